"""The backward of one call of a compiled graph: hooks on its autograd function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

#: Dynamo does not trace this module: its hooks run when the backward does, in frames that may be compiled.
DYNAMO_SKIPS = True


def next_function_number() -> int:
    """The number that the next autograd function of this thread gets."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def backward_of(results: Iterable[object], since: int) -> Any:
    """The autograd function that AOTAutograd made for the call which returned these, or None.

    Results that are views have functions of their own, behind which it is; those made before the number `since` belong
    to what ran before the call.
    """
    todo = [value.grad_fn for value in results if isinstance(value, Tensor) and value.grad_fn is not None]
    seen = set()
    while todo:
        function: Any = todo.pop()
        if function in seen or function._sequence_nr() < since:
            continue
        seen.add(function)
        if type(function).__name__ == "CompiledFunctionBackward":
            return function
        todo += [before for before, _ in function.next_functions if before is not None]
    return None


def watch_backward(function: Any, begins: Callable[[], None] | None, ended: Callable[[], None]) -> None:
    """Has the functions called before and after a backward runs; they live as long as its autograd function."""
    if begins is not None:

        def before(_: Any, begins: Callable[[], None] = begins) -> None:
            begins()

        function.register_prehook(before)

    def after(*_: Any) -> None:
        ended()

    function.register_hook(after)
