"""What a function reaches without being given it: tensors that it closes over, modules with theirs, generators."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.checkpoint_state import BodyState, GradientFlags, refuse_writes
from partita._torch.saving_hooks import around_hooks
from partita._torch.versions import version_of
from partita.errors import RecomputeError

__all__ = ["OutsideLeaves", "found_outside", "refuse_by_hand", "refuse_generators"]


def refuse_by_hand(function: Any, arguments: Iterable[Any]) -> None:
    """Raises where a module that runs as a whole has a norm in training, or anything is given a generator of its own.

    torch does not count what norms write, and only the default generators are put back.
    """
    module = function
    while isinstance(module, partial):
        module = module.func
    if isinstance(module, nn.Module):
        refuse_writes(BodyState(module).statistics, is_graph=False)
        for path, inner in module.named_modules():
            for key, held in vars(inner).items():
                _refuse_generator(f"{path}.{key}".strip("."), held)
    for name, value in _closed_over(function):
        _refuse_generator(name, value)
    refuse_generators(arguments)


def refuse_generators(arguments: Iterable[Any]) -> None:
    """Raises where a body is given a generator."""
    for place, given in enumerate(arguments):
        _refuse_generator(f"argument {place}", given)


def _refuse_generator(name: str, value: Any) -> None:
    if isinstance(value, torch.Generator):
        raise RecomputeError(
            f"the body draws from a generator of its own, {name!r}, which would draw other numbers when it is "
            "recomputed; draw from the default generator, or outside of the region"
        )


def found_outside(function: Any, arguments: Iterable[Any] = ()) -> dict[str, Tensor]:
    """The tensors that a function reaches by what it closes over, is bound to, or finds in modules that it is given."""
    found: dict[str, Tensor] = {}
    modules = ((f"argument {place}", given) for place, given in enumerate(arguments) if isinstance(given, nn.Module))
    for name, value in (*_closed_over(function), *modules):
        if isinstance(value, Tensor):
            found.setdefault(name, value)
        elif isinstance(value, nn.Module):
            for table in (value.named_parameters(), value.named_buffers()):
                found.update((f"{name}.{path}", tensor) for path, tensor in table)
    return found


class OutsideLeaves:
    """The tensors without history that autograd wanted to save in the first run, which must be the same in the second.

    Autograd itself would notice if one of them were written. Weights of which the function has not been told are among
    them; results of the function that nobody else holds are not there any more when it is asked.
    """

    def __init__(self, function: Any, arguments: Iterable[Tensor]) -> None:
        self._function = function
        self._arguments = {id(_whole(tensor)) for tensor in arguments}
        self._seen: list[tuple[weakref.ref[Tensor], int | None]] = []
        reached = found_outside(function).values()
        self._flags = GradientFlags(tensor for tensor in reached if isinstance(tensor, nn.Parameter))

    def noting(self) -> AbstractContextManager[Any]:
        """While the first run lasts."""
        return around_hooks(self._note)

    def unchanged(self) -> AbstractContextManager[Any]:
        """While the second run lasts: what the function reaches wants gradients if it did; raises if it was written."""
        for told, version in self._seen:
            tensor = told()
            if tensor is not None and version_of(tensor) != version:
                raise RecomputeError(
                    f"{self._name(tensor)} changed in place between forward and backward, so the function that reads "
                    "it would be recomputed with other values; run backward before you update what it needs"
                )
        return self._flags.restored()

    def _note(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        whole = _whole(tensor)
        if whole.is_leaf and id(whole) not in self._arguments:
            self._seen.append((weakref.ref(whole), version_of(whole)))
        return pack(tensor)

    def _name(self, tensor: Tensor) -> str:
        for name, value in found_outside(self._function).items():
            if value is tensor:
                return repr(name)
        return f"a tensor of shape {tuple(tensor.shape)} that is no argument"


def _whole(tensor: Tensor) -> Tensor:
    """What a tensor is a view of: a product saves its weight transposed."""
    return tensor if tensor._base is None else tensor._base


def _closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, partial):
        yield from ((f"argument {place}", value) for place, value in enumerate(function.args))
        yield from function.keywords.items()
        if isinstance(function.func, nn.Module):
            yield "function", function.func
        yield from _closed_over(function.func)
        return
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield "self", owner
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # A variable that is not set yet.
            continue
