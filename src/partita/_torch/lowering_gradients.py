"""Gradients of compiled code: which inputs those of each output flow to, read from the history of a run of the body.

Compiled code has one backward for all outputs, and gives zeros to an input that only an unused output depends on. Plain
torch gives such an input nothing, and an optimizer can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

__all__ = ["UnusedGradients", "ask_for_gradients", "has_history", "history_of", "is_locked_view", "links_of"]


def history_of(inputs: Sequence[Any]) -> list[Any]:
    """What each input that requires a gradient is known by in a history; a write gives it another, so ask before."""
    return [
        (value if value.grad_fn is None else value.grad_fn)
        if isinstance(value, Tensor) and value.requires_grad
        else None
        for value in inputs
    ]


def has_history(value: Tensor) -> bool:
    """Whether gradients would flow from a result; not from one that autograd refuses to tell of."""
    try:
        return value.grad_fn is not None
    except RuntimeError:
        return False


def ask_for_gradients(inputs: Iterable[Any]) -> None:
    """Makes every fake input that can have a gradient ask for one."""
    for value in inputs:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            value.requires_grad_()


def links_of(histories: Sequence[Any], results: Iterable[Any]) -> tuple[frozenset[int], ...]:
    """For each result of a run, the places of the inputs, of these histories, that its gradient flows to."""
    known = {id(history): place for place, history in enumerate(histories) if history is not None}
    return tuple(frozenset(known[at] for at in _reached(result) if at in known) for result in results)


def _reached(result: Any) -> set[int]:
    """The ids of the functions, and of the tensors without one, that a backward pass from `result` would come to."""
    if not isinstance(result, Tensor) or not result.requires_grad:
        return set()
    if result.grad_fn is None:
        return {id(result)}
    # The objects that stand for functions live as long as somebody holds them.
    held: dict[int, Any] = {}
    reached: set[int] = set()
    waiting = [result.grad_fn]
    while waiting:
        function = waiting.pop()
        if id(function) in held:
            continue
        held[id(function)] = function
        variable = getattr(function, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        waiting += [before for before, _ in function.next_functions if before is not None]
    return reached | held.keys()


def is_locked_view(value: Tensor) -> bool:
    """Whether a result is a view that was made inside of one function of autograd, so that nobody may write to it."""
    return value._is_view() and isinstance(value.grad_fn, BackwardCFunction)


class UnusedGradients:
    """Takes the gradients of inputs that no used output depends on out of what one backward for all outputs gives.

    `links` are the places of the inputs that each output depends on.
    """

    def __init__(self, links: Sequence[frozenset[int]]) -> None:
        self._links = links
        #: By the place of a gradient: the input that it is for. Found in the first call, since it is always the same.
        self._inputs: dict[int, int] | None = None

    def watch(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Sees to the backward of a call that gave `outputs` for `inputs`."""
        function = next((value.grad_fn for value in outputs if isinstance(value, Tensor) and value.requires_grad), None)
        if function is None:
            return
        if self._inputs is None:
            self._inputs = _inputs_of(function, inputs)
        places, links = self._inputs, self._links
        known = {
            value.output_nr: links[place]
            for place, value in enumerate(outputs)
            if isinstance(value, Tensor) and value.grad_fn is function
        }

        def hook(given: Sequence[Any], used: Sequence[Any]) -> tuple[Any, ...] | None:
            numbers = [number for number, gradient in enumerate(used) if gradient is not None]
            if not all(number in known for number in numbers):
                return None
            needed = frozenset[int]().union(*(known[number] for number in numbers))
            return tuple(
                None if at in places and places[at] not in needed else gradient for at, gradient in enumerate(given)
            )

        function.register_hook(hook)


def _inputs_of(function: Any, inputs: Sequence[Any]) -> dict[int, int]:
    """Which input each gradient that `function` gives is for."""
    known = {id(history): place for place, history in enumerate(history_of(inputs)) if history is not None}
    found: dict[int, int] = {}
    for at, (before, _) in enumerate(function.next_functions):
        target = getattr(before, "variable", None)
        place = known.get(id(before if target is None else target))
        if place is not None:
            found[at] = place
    return found
