"""What a function reads without being given it: tensors that it closes over, and modules with theirs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from partita._torch.schemas import version_of
from partita.errors import RecomputeError

__all__ = ["OutsideLeaves", "found_outside"]


def found_outside(function: Any) -> dict[str, Tensor]:
    """The tensors that a function of Python can reach by what it closes over, or by the object that it is bound to."""
    found: dict[str, Tensor] = {}
    for name, value in _closed_over(function):
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

    def __init__(self, function: Any) -> None:
        self._function = function
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While the first run lasts."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            yield
            return
        pack, unpack = hooks

        def note(tensor: Tensor) -> Any:
            whole = tensor if tensor._base is None else tensor._base  # A product saves its weight transposed.
            if whole.is_leaf:
                self._seen.append((weakref.ref(whole), version_of(whole)))
            return pack(tensor)

        with saved_tensors_hooks(note, unpack):
            yield

    def check(self) -> None:
        """Before the second run."""
        for told, version in self._seen:
            tensor = told()
            if tensor is not None and version_of(tensor) != version:
                raise RecomputeError(
                    f"{self._name(tensor)} changed in place between forward and backward, so the function that reads "
                    "it would be recomputed with other values; run backward before you update what it needs"
                )

    def _name(self, tensor: Tensor) -> str:
        for name, value in found_outside(self._function).items():
            if value is tensor:
                return repr(name)
        return f"a tensor of shape {tuple(tensor.shape)} that is no argument"


def _closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, partial):
        yield from ((f"argument {place}", value) for place, value in enumerate(function.args))
        yield from function.keywords.items()
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
