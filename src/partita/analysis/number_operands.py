"""Numbers among the operands of sums, products and quotients that a tensor without dimensions can replace.

A tensor without dimensions on the CPU, in double precision or of 64-bit integers, gives the same bits, dtype and
gradients as the number, where the other operand has dimensions and is of the kind of numbers that decides the dtype:
torch promotes both only to another kind, and its kernels read a scalar on the CPU as they read a number. Elsewhere this
does not hold: integers times 0.5 become `float32`, times a tensor `float64`, and so does a tensor without dimensions.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from partita._torch.fake_tensors import fake_mode_of
from partita._torch.functorch import is_inside_transform
from partita._torch.tensors import inner_tensors
from partita.analysis.nodes import value_of


class NumberOperand(NamedTuple):
    """A number among the positional arguments of a node, which a tensor can replace."""

    place: int
    number: int | float
    #: The dtype of the tensor.
    dtype: torch.dtype
    #: What is then called.
    target: Any

    def tensor(self) -> Tensor:
        """The number as a tensor, which autograd can use whatever modes are active now."""
        with torch.inference_mode(mode=False):
            return torch.tensor(self.number, dtype=self.dtype, device="cpu")

    def arguments(self, other: Node, number: Node) -> tuple[Node, Node]:
        """The arguments of that call: the other operand, and the tensor for the number."""
        # Python turns `2 * x` round; kernels for half precision round a tensor on the left first.
        is_first = self.place == 0 and self.target not in (operator.add, operator.mul)
        return (number, other) if is_first else (other, number)


def number_operand(node: Node) -> NumberOperand | None:
    """The number that a tensor can replace; None if the node has none, or has several."""
    if node.op == "call_function":
        known = _FUNCTIONS.get(node.target)
    else:
        known = _METHODS.get(str(node.target)) if node.op == "call_method" else None
    if known is None or len(node.args) != 2 or node.kwargs:
        return None
    place = 1 if isinstance(node.args[0], Node) else 0
    number, read = node.args[place], node.args[1 - place]
    if place not in known.places or type(number) not in (int, float) or not isinstance(read, Node):
        return None
    value, result = value_of(read), value_of(node)
    if not _is_plain(value) or not _is_plain(result) or value.dtype != result.dtype or _may_get_dimensions(read):
        return None
    dtype = _dtype_for(number, value.dtype, only_floats=known.only_floats)  # type: ignore[arg-type]
    if dtype is None or is_inside_transform(node):
        return None
    return NumberOperand(place, number, dtype, known.target)  # type: ignore[arg-type]


def _is_plain(value: Any) -> bool:
    """Whether it is a strided tensor with dimensions, and of no class of its own."""
    return (
        isinstance(value, Tensor)
        and (fake_mode_of(value) is not None or type(value) in (Tensor, nn.Parameter))
        and value.layout is torch.strided
        and not value.is_nested
        and value.dim() > 0
        and value.device.type in _DEVICES
        and not inner_tensors(value)
    )


def _may_get_dimensions(read: Node) -> bool:
    """Whether a tensor may get dimensions after it was read: Dynamo's values are those at the end of a trace."""
    return any(user.op == "call_method" and user.target in _RESHAPING for user in read.users)


def _dtype_for(number: int | float, dtype: torch.dtype, *, only_floats: bool) -> torch.dtype | None:
    """The dtype of a tensor that stands for a number beside tensors of this dtype; None if none does."""
    if dtype in _FLOATS:
        # A number that is an integer in one layer may be none in another.
        return torch.float64 if isinstance(number, float) or abs(number) <= _EXACT_IN_DOUBLE else None
    if dtype in _INTEGERS and isinstance(number, int) and not only_floats:
        limits = torch.iinfo(dtype)
        return torch.int64 if limits.min <= number <= limits.max else None
    return None


_DEVICES = frozenset(("cpu", "cuda", "meta"))
_FLOATS = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_EXACT_IN_DOUBLE = 1 << 53
_RESHAPING = frozenset(("unsqueeze_", "resize_", "resize_as_", "set_", "as_strided_"))


class _Known(NamedTuple):
    """At which places a number can be replaced, in the arguments of what is then called."""

    target: Any
    places: tuple[int, ...]
    #: Quotients of integers are floats.
    only_floats: bool


def _known(*targets: Any, places: tuple[int, ...] = (1,), only_floats: bool = False) -> dict[Any, _Known]:
    return {target: _Known(target, places, only_floats) for target in targets}


_aten: Any = torch.ops.aten

#: `x / 2` is a quotient, but `2 / x` is a product of the reciprocal.
_FUNCTIONS: Mapping[Any, _Known] = {
    **_known(operator.add, operator.sub, operator.mul, places=(0, 1)),
    **_known(operator.iadd, operator.isub, operator.imul),
    **_known(operator.truediv, operator.itruediv, only_floats=True),
    **_known(torch.add, torch.sub, torch.subtract, torch.mul, torch.multiply),
    **_known(torch.div, torch.divide, torch.true_divide, only_floats=True),
    **_known(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor),
    **_known(_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor),
    **_known(_aten.div.Tensor, _aten.div_.Tensor, only_floats=True),
    _aten.add.Scalar: _Known(_aten.add.Tensor, (1,), only_floats=False),
    _aten.sub.Scalar: _Known(_aten.sub.Tensor, (1,), only_floats=False),
    _aten.mul.Scalar: _Known(_aten.mul.Tensor, (1,), only_floats=False),
    _aten.div.Scalar: _Known(_aten.div.Tensor, (1,), only_floats=True),
    _aten.rsub.Scalar: _Known(_aten.rsub.Tensor, (1,), only_floats=False),
}
_METHODS: Mapping[str, _Known] = {
    **_known("add", "sub", "subtract", "mul", "multiply", "add_", "sub_", "subtract_", "mul_", "multiply_"),
    **_known("div", "divide", "true_divide", "div_", "divide_", "true_divide_", only_floats=True),
}
