"""Fake inputs of a compilation: made from what tensors look like, in memory of their own, with fresh symbols for sizes.

A fake that is made from a real tensor shares memory with the fakes of its relatives, and compiled code then rests on
that; the next call may bring tensors that are not related. Sizes that happen to be equal are different symbols.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["FakeInputs", "Size", "stand_ins", "strides_of"]

#: A size, a stride or an integer: known, or a symbol.
Size: TypeAlias = int | torch.SymInt


class FakeInputs:
    """A fake mode with a shape environment of its own, and what was made in it."""

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
        """A fake tensor that looks like this."""
        with torch.inference_mode(False), torch.enable_grad(), self.mode:
            leaf = torch.empty_strided(tuple(sizes), tuple(strides), dtype=dtype, device=device)
            leaf.requires_grad_(requires_grad)
            if is_leaf or not requires_grad:
                return leaf
            return torch.empty_strided(tuple(sizes), tuple(strides), dtype=dtype, device=device).copy_(leaf)

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
    """What looks like these traced values for the sizes that they were traced with; None where a size is not known."""
    fakes = FakeInputs()
    try:
        return [_stand_in(value, fakes) for value in values]
    except _UnknownSizeError:
        return None


def _stand_in(value: Any, fakes: FakeInputs) -> Any:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return _known(value)
    if not isinstance(value, Tensor):
        return value
    return fakes.tensor(
        [_known(size) for size in value.shape],
        [_known(stride) for stride in value.stride()],
        dtype=value.dtype,
        device=value.device,
        requires_grad=False,
        is_leaf=True,
    )


def _known(number: Any) -> Any:
    node = getattr(number, "node", None)
    if node is None:
        return number
    if not node.has_hint():
        raise _UnknownSizeError
    return node.hint


class _UnknownSizeError(Exception):
    """A size that depends on data."""


def strides_of(sizes: Sequence[int], strides: Sequence[int], symbolic: Sequence[Size]) -> tuple[Size, ...]:
    """The strides of a tensor of these `symbolic` sizes that is laid out like one of these sizes and strides."""
    found: list[Size] = list(strides)
    products: dict[int, Size] = {}
    for axis in sorted(range(len(sizes)), key=lambda axis: (strides[axis], sizes[axis])):
        if strides[axis] > 1:
            found[axis] = products.get(strides[axis], strides[axis])
        products.setdefault(sizes[axis] * strides[axis], symbolic[axis] * found[axis])
    return tuple(found)
