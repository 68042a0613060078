"""Bodies made of the operators that a backend supports, so that one that supports few is tested by these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from partita.capture import capture
from partita.testing.backend_bodies import Body
from partita.testing.generator.state import ramp

#: An operator applied to the inputs of these bodies: two of any number of rows and four columns, a weight and a bias.
Applied: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

aten = torch.ops.aten

#: Operators that keep the shape of their input, so that each can take the result of another.
_SAME_SHAPE: Mapping[str, Applied] = MappingProxyType(
    {
        **{
            f"{name}.default": lambda x, y, w, b, name=name: getattr(aten, name).default(x)  # type: ignore[misc]
            for name in ("relu", "sin", "cos", "tanh", "sigmoid", "neg", "abs", "exp", "gelu", "silu", "clone")
        },
        **{
            f"{name}.Tensor": lambda x, y, w, b, name=name: getattr(aten, name).Tensor(x, y)  # type: ignore[misc]
            for name in ("add", "sub", "mul")
        },
        "maximum.default": lambda x, y, w, b: aten.maximum.default(x, y),
        "minimum.default": lambda x, y, w, b: aten.minimum.default(x, y),
        "linear.default": lambda x, y, w, b: aten.linear.default(x, w, b),
        "matmul.default": lambda x, y, w, b: aten.matmul.default(x, w),
        "mm.default": lambda x, y, w, b: aten.mm.default(x, w),
        "addmm.default": lambda x, y, w, b: aten.addmm.default(b, x, w),
        "softmax.int": lambda x, y, w, b: aten.softmax.int(x, -1),
        "_softmax.default": lambda x, y, w, b: aten._softmax.default(x, -1, half_to_float=False),
        "layer_norm.default": lambda x, y, w, b: aten.layer_norm.default(x, [4]),
    }
)
_OTHER_SHAPE: Mapping[str, Applied] = MappingProxyType(
    {
        "div.Tensor": lambda x, y, w, b: aten.div.Tensor(x, w.sum()),
        "sum.default": lambda x, y, w, b: aten.sum.default(x),
        "sum.dim_IntList": lambda x, y, w, b: aten.sum.dim_IntList(x, [1]),
        "mean.default": lambda x, y, w, b: aten.mean.default(x),
        "mean.dim": lambda x, y, w, b: aten.mean.dim(x, [-1]),
        "amax.default": lambda x, y, w, b: aten.amax.default(x, [1]),
        "cumsum.default": lambda x, y, w, b: aten.cumsum.default(x, 0),
        "cat.default": lambda x, y, w, b: aten.cat.default([x, y], 1),
        "t.default": lambda x, y, w, b: aten.t.default(x),
        "transpose.int": lambda x, y, w, b: aten.transpose.int(x, 0, 1),
        "permute.default": lambda x, y, w, b: aten.permute.default(x, [1, 0]),
        "view.default": lambda x, y, w, b: aten.view.default(x, [-1, 2]),
        "reshape.default": lambda x, y, w, b: aten.reshape.default(x, [-1, 2]),
        "unsqueeze.default": lambda x, y, w, b: aten.unsqueeze.default(x, 0),
        "slice.Tensor": lambda x, y, w, b: aten.slice.Tensor(x, 1, 0, 2),
        "to.dtype": lambda x, y, w, b: aten.to.dtype(x, torch.float64),
        "gt.Tensor": lambda x, y, w, b: aten.gt.Tensor(x, y),
    }
)
_OPERATORS: Mapping[str, Applied] = MappingProxyType({**_SAME_SHAPE, **_OTHER_SHAPE})
_LAW = "each operator that it supports is right, alone and after others"


def supported_operators(refusal: Callable[[Node], str | None]) -> tuple[str, ...]:
    """The operators among those that are known here of which a backend takes every node, in captured form."""

    class Applies(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            return tuple(apply(x, y, w, b) for apply in _OPERATORS.values())

    graph = capture(Applies(), _plain_inputs(5)).graph
    found: dict[str, bool] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            name = str(node.target).removeprefix("aten.")
            found[name] = found.get(name, True) and not refusal(node)
    return tuple(name for name in _OPERATORS if found.get(name, False))


def bodies_of(names: Sequence[str]) -> tuple[Body, ...]:
    """A body that applies each operator by itself, and one that applies those that keep a shape one after another."""
    chained = [name for name in names if name in _SAME_SHAPE]

    def supported_alone(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Any, ...]:
        return tuple(_OPERATORS[name](x, y, w, b) for name in names)

    def supported_chain(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Any, ...]:
        found = [x]
        for name in chained:
            found.append(_OPERATORS[name](found[-1], y, w, b))
        return found[-1], found[len(found) // 2]

    alone = [Body(_LAW, supported_alone, _inputs)] if names else []
    return (*alone, *([Body(_LAW, supported_chain, _inputs)] if len(chained) > 1 else []))


def body_of(name: str) -> Body:
    """A body of one operator."""

    def single(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Any, ...]:
        return (_OPERATORS[name](x, y, w, b),)

    single.__name__ = f"aten.{name}"
    return Body(_LAW, single, _inputs)


def _plain_inputs(rows: int) -> tuple[Tensor, ...]:
    # Some values are larger than any bound that an activation function may have, such as the 6 of relu6.
    x = ramp(rows, 4)
    x.view(-1)[1::5] *= 16
    return x, ramp(rows, 4, phase=1.0), ramp(4, 4, phase=2.0), ramp(4, phase=3.0)


def _inputs(rows: int) -> tuple[Any, ...]:
    return tuple(tensor.requires_grad_() for tensor in _plain_inputs(rows))
