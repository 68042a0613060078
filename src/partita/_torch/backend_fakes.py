"""Fake inputs of a compilation: a tracing context of their own, and the symbols in their sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["SYMBOLIC", "compiling", "mode_of", "place_of_symbol", "size_carrier", "unnamed_sizes"]

#: The classes of symbolic numbers.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@contextmanager
def compiling(inputs: Sequence[Any]) -> Iterator[None]:
    """A tracing context for these fake inputs.

    AOTAutograd writes what it learns of a graph on the context, and Inductor reads it there, so that no two
    compilations may share one. The backward is compiled now, not at its first call, which no lock would cover.
    """
    import torch._functorch.config as settings
    from torch._guards import TracingContext, tracing

    wanted = {"donated_buffer": False, "force_non_lazy_backward_lowering": True}
    patches = {name: value for name, value in wanted.items() if hasattr(settings, name)}
    with tracing(TracingContext(mode_of(inputs))), settings.patch(patches):
        yield


def unnamed_sizes(inputs: Sequence[Any]) -> list[tuple[int, int]]:
    """Where to read each symbol that only sizes of tensors mention: the number of an input and an axis of it."""
    known = {value.node.expr for value in inputs if isinstance(value, torch.SymInt)}
    found: list[tuple[int, int]] = []
    for place, value in enumerate(inputs):
        for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and size.node.expr not in known:
                known.add(size.node.expr)
                found.append((place, axis))
    return found


def place_of_symbol(number: torch.SymInt, inputs: Sequence[Any]) -> tuple[int, int] | None:
    """The first input and axis of it with this symbolic size; None if no input has it."""
    for place, value in enumerate(inputs):
        for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr == number.node.expr:
                return place, axis
    return None


def size_carrier(number: int | torch.SymInt, inputs: Sequence[Any] = ()) -> Tensor:
    """A tensor without elements whose first size is the number; a fake one beside fake `inputs`."""
    if isinstance(number, torch.SymInt):
        with mode_of([*inputs, number]):
            return torch.empty((number, 0))
    return torch.empty((number, 0))


def mode_of(inputs: Sequence[Any]) -> Any:
    """The fake mode of these inputs, or a new one where none of them is a fake."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for value in inputs:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    for value in inputs:
        if isinstance(value, SYMBOLIC):
            return FakeTensorMode(shape_env=value.node.shape_env)
    return FakeTensorMode(shape_env=ShapeEnv())
