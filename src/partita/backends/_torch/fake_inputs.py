"""Fake inputs of a compilation: their tracing context, and the symbols in their sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from partita._torch.fake_tensors import fake_mode_of
from partita._torch.symbolic_shapes import SYMBOLIC


@contextmanager
def compiling(inputs: Sequence[Any]) -> Iterator[None]:
    """A tracing context for these fake inputs.

    AOTAutograd stores metadata of a graph in the context, and Inductor reads it there, so that no two compilations may
    share one. The backward is compiled now, not at its first call, which no lock would cover.
    """
    from functorch.compile import config as settings
    from torch._guards import TracingContext, tracing

    wanted = {"donated_buffer": False, "force_non_lazy_backward_lowering": True}
    patches = {name: value for name, value in wanted.items() if hasattr(settings, name)}
    with tracing(TracingContext(mode_of(inputs))), settings.patch(patches):
        yield


def unnamed_sizes(inputs: Sequence[Any]) -> list[tuple[int, int]]:
    """Where to read each symbol that occurs in sizes of tensors only: the number of an input and an axis of it."""
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
            return torch.empty((number, 0), device="cpu")
    return torch.empty((number, 0), device="cpu")


def mode_of(inputs: Sequence[Any]) -> Any:
    """The fake mode of these inputs, or a new one where none of them is a fake."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for mode in map(fake_mode_of, inputs):
        if mode is not None:
            return mode
    for value in inputs:
        if isinstance(value, SYMBOLIC):
            return FakeTensorMode(shape_env=value.node.shape_env)
    return FakeTensorMode(shape_env=ShapeEnv())


#: A size, a stride or an integer: known, or a symbol.
Size: TypeAlias = int | torch.SymInt


class FakeInputs:
    """Makes fake inputs from metadata, in separate memory, with fresh symbols for sizes.

    Fakes that are made from real tensors alias where these do, and compiled code then relies on it; the tensors of the
    next call may not alias. Sizes that happen to be equal are different symbols.
    """

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv()
        self.mode: Any = FakeTensorMode(shape_env=self.env)
        self._symbols: dict[Hashable, Size] = {}

    def size(self, value: int, key: Hashable) -> Size:
        """A symbol for a size, the same for the same key; 0 and 1 are never symbols, since code differs for them."""
        return self._symbol(value, key, is_size=True)

    def number(self, value: int, key: Hashable) -> Size:
        """A symbol for any integer, the same for the same key."""
        return self._symbol(value, key, is_size=False)

    def tensor(
        self,
        sizes: Sequence[Size],
        strides: Sequence[Size],
        *,
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        is_leaf: bool,
    ) -> Tensor:
        """A fake tensor with this metadata."""
        with torch.inference_mode(False), torch.enable_grad(), self.mode:
            leaf = torch.empty_strided(tuple(sizes), tuple(strides), dtype=dtype, device=device)
            leaf.requires_grad_(requires_grad)
            if is_leaf or not requires_grad:
                return leaf
            return torch.empty_strided(tuple(sizes), tuple(strides), dtype=dtype, device=device).copy_(leaf)

    def like(self, traced: Any, known: Callable[[Any], Any]) -> Any:
        """A fake like a traced tensor, without gradients; `known` gives its sizes, and any value that is no tensor."""
        if not isinstance(traced, Tensor):
            return known(traced)
        sizes, strides = list(map(known, traced.shape)), list(map(known, traced.stride()))
        return self.tensor(sizes, strides, dtype=traced.dtype, device=traced.device, requires_grad=False, is_leaf=True)

    def _symbol(self, value: int, key: Hashable, *, is_size: bool) -> Size:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        known = self._symbols.get(key)
        if known is None:
            source = ConstantSource(f"input_size_{len(self._symbols)}")
            make = self.env.create_symbol if is_size else self.env.create_unspecified_symbol
            symbol = make(value, source, dynamic_dim=DimDynamic.DYNAMIC)
            known = self.env.create_symintnode(symbol, hint=value, source=source)
            self._symbols[key] = known
        return known


def stand_ins(values: Sequence[Any]) -> list[Any] | None:
    """Fakes like these traced values, with the sizes that they were traced with; None where a size is unknown."""
    fakes = FakeInputs()
    try:
        return [fakes.like(value, _known) for value in values]
    except _UnknownSizeError:
        return None


def _known(value: Any) -> Any:
    if not isinstance(value, SYMBOLIC):
        return value
    if not value.node.has_hint():
        raise _UnknownSizeError
    return value.node.hint


class _UnknownSizeError(Exception):
    """A size that depends on data."""


def strides_of(sizes: Sequence[int], strides: Sequence[int], symbolic: Sequence[Size]) -> tuple[Size, ...]:
    """The strides of a tensor of `symbolic` sizes with the same layout as one of these sizes and strides."""
    found: list[Size] = list(strides)
    products: dict[int, Size] = {}
    for axis in sorted(range(len(sizes)), key=lambda axis: (strides[axis], sizes[axis])):
        if strides[axis] > 1:
            found[axis] = products.get(strides[axis], strides[axis])
        products.setdefault(sizes[axis] * strides[axis], symbolic[axis] * found[axis])
    return tuple(found)
