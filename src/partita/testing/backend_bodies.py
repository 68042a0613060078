"""Bodies that test backends: small functions, each of which does one thing that a compiler may get wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.nn import functional

from partita.lowering.constants import holding
from partita.testing.generator.state import ramp

#: The inputs of a body, by how many rows their tensors have.
Inputs: TypeAlias = Callable[[int], tuple[Any, ...]]


@final
@dataclass(frozen=True, slots=True)
class Body:
    """A function of tensors and numbers that returns a flat tuple, the law it tests, and its inputs."""

    law: str
    function: Callable[..., tuple[Any, ...]]
    inputs: Inputs
    under: Callable[[], AbstractContextManager[Any]] = nullcontext
    #: Whether a program of it is lowered too: `Lower` makes views itself.
    lowered: bool = False
    #: The last inputs, where the body holds them as constants; only for backends that want these.
    held: tuple[Tensor, ...] = ()

    @property
    def name(self) -> str:
        return self.function.__name__

    def graph_module(self) -> GraphModule:
        return self.holding(symbolic_trace(self.function))

    def holding(self, traced: GraphModule) -> GraphModule:
        """The body, traced with all inputs, as a backend gets it."""
        first = len(traced.graph.find_nodes(op="placeholder")) - len(self.held)
        return holding(traced, dict(enumerate(self.held, first))) if self.held else traced


class CapturedLayer(nn.Module):
    """A layer to capture for any number of rows: parameters, a buffer, and sizes in its arithmetic."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.linear.weight.copy_(ramp(4, 4))
            self.linear.bias.copy_(ramp(4, phase=1.0))
        self.register_buffer("scale", ramp(4, phase=2.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x)) * self.scale
        return torch.reshape(hidden, (x.shape[0] * 2, 2)) + torch.sum(x) / x.shape[0]


aten = torch.ops.aten


def elementwise(x: Tensor, other: Tensor) -> tuple[Any, ...]:
    return torch.sin(torch.mul(x, other)), torch.add(x, other)


def operators(x: Tensor, other: Tensor) -> tuple[Any, ...]:
    """`elementwise`, as torch.export writes it."""
    return aten.sin.default(aten.mul.Tensor(x, other)), aten.add.Tensor(x, other)


def arithmetic(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Any, ...]:
    hidden = functional.layer_norm(functional.gelu(functional.linear(x, weight, bias)), (4,))
    return torch.softmax(hidden, -1), torch.sum(hidden * hidden), torch.argmax(hidden, -1)


def dtypes(x: Tensor, whole: Tensor, half: Tensor, double: Tensor) -> tuple[Any, ...]:
    return x * double, half + half, whole // 2, whole > 1, torch.cumsum(double, 0)


def strides(x: Tensor, turned: Tensor, spread: Tensor) -> tuple[Any, ...]:
    return turned * 2, torch.transpose(turned, 0, 1) + x, torch.relu(spread)


def several_uses(x: Tensor, frozen: Tensor) -> tuple[Any, ...]:
    first, second = torch.chunk(torch.tanh(x) * frozen, 2, 1)
    return first * second, torch.sum(first), frozen * 2


def accumulation(x: Tensor, total: Tensor) -> tuple[Any, ...]:
    total.add_(x.detach())
    before = torch.sin(total)
    total[1:].mul_(0.5)
    return before * x, torch.sum(total)


def only_a_write(total: Tensor) -> tuple[Any, ...]:
    total.add_(1)
    return ()


def views(x: Tensor) -> tuple[Any, ...]:
    made = torch.sin(x)
    return x, x[1:], torch.reshape(x, (-1,)), made, made, made[:, 1:]


def reshapes(x: Tensor, total: Tensor) -> tuple[Any, ...]:
    turned = total[1:]
    turned.t_()
    made = torch.cos(x)
    made.unsqueeze_(0)
    return turned, torch.mul(turned, 2), made


def one_output(x: Tensor) -> tuple[Any, ...]:
    return (torch.sin(x),)


def plain_outputs(x: Tensor) -> tuple[Any, ...]:
    return None, 3, 2.5, True, torch.cos(x), x.size(0), x.size(1) * 0.5


def empty_outputs(x: Tensor) -> tuple[Any, ...]:
    return x[:0], torch.exp(x[:, 4:]), torch.sum(x)


def complex_outputs(x: Tensor) -> tuple[Any, ...]:
    turned = torch.complex(x, torch.sin(x))
    return turned * turned, torch.abs(turned), torch.view_as_real(turned)


def plain_inputs(x: Tensor, rows: int, factor: float, nothing: None) -> tuple[Any, ...]:
    return x * factor + rows, torch.reshape(x, (rows * 2, 2)), nothing, rows


def random_numbers(x: Tensor) -> tuple[Any, ...]:
    return torch.rand_like(x), functional.dropout(x, 0.5, True), torch.bernoulli(torch.sigmoid(x))


def computed_sizes(x: Tensor, other: Tensor) -> tuple[Any, ...]:
    rows = x.size(0)
    return torch.reshape(x, (rows * 2, 2)), torch.cat((x, other)), torch.sum(x) / rows, rows * 2


def without_gradients(x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    return functional.linear(x, weight), torch.sin(x)


def cast(x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    return functional.linear(x, weight), torch.sum(torch.exp(x))


def inference(x: Tensor, total: Tensor) -> tuple[Any, ...]:
    total.mul_(2)
    return torch.sin(x), total + 1


def constants(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> tuple[Any, ...]:
    return functional.linear(x, weight, bias) * scale, torch.add(x, bias)


def _leaf(*shape: int, phase: float = 0.0) -> Tensor:
    return ramp(*shape, phase=phase).requires_grad_()


def _one(rows: int) -> tuple[Any, ...]:
    return (_leaf(rows, 4),)


def _strided(rows: int) -> tuple[Any, ...]:
    return _leaf(4, rows), ramp(4, rows).transpose(0, 1).requires_grad_(), ramp(1, 4).expand(rows, 4)


_VALUES = "numbers are right, within the tolerance that it declares"
_GRADIENTS = "gradients flow to every input that requires one"
_MUTATIONS = "what the body mutates is mutated once"
_ALIASES = "outputs alias what they alias in the body"
_SHAPES = "a shape that is changed in-place stays changed"
_TUPLES = "a single output comes in a tuple or a list too"
_OUTPUTS = "None, numbers, complex and empty tensors are returned unchanged"
_INPUTS = "plain numbers and None are accepted as inputs"
_RANDOM = "random numbers are those of the seed, and the generator advances"
_SIZES = "sizes are those of the call"
_CONSTANTS = "parameters and buffers that the body holds have their values"
_MODES = "modes hold inside, and are restored after it"

BODIES: tuple[Body, ...] = (
    Body(_VALUES, elementwise, lambda rows: (_leaf(rows, 4), _leaf(rows, 4, phase=1.0))),
    Body(_VALUES, operators, lambda rows: (_leaf(rows, 4), _leaf(rows, 4, phase=1.0))),
    Body(_VALUES, arithmetic, lambda rows: (_leaf(rows, 4), _leaf(4, 4, phase=1.0), _leaf(4, phase=2.0))),
    Body(
        _VALUES,
        dtypes,
        lambda rows: (_leaf(rows, 4), torch.arange(rows), ramp(rows, 4).bfloat16(), ramp(rows, 4).double()),
    ),
    Body(_VALUES, strides, _strided),
    Body(_GRADIENTS, several_uses, lambda rows: (_leaf(rows, 4), ramp(rows, 4, phase=1.0))),
    Body(_MUTATIONS, accumulation, lambda rows: (_leaf(rows, 4), ramp(rows, 4, phase=1.0))),
    Body(_MUTATIONS, only_a_write, lambda rows: (ramp(rows, 4),)),
    Body(_ALIASES, views, _one, lowered=True),
    Body(_SHAPES, reshapes, lambda rows: (_leaf(rows, 4), ramp(rows, 4, phase=1.0)), lowered=True),
    Body(_TUPLES, one_output, _one),
    Body(_OUTPUTS, plain_outputs, _one),
    Body(_OUTPUTS, empty_outputs, _one),
    Body(_OUTPUTS, complex_outputs, _one),
    Body(_INPUTS, plain_inputs, lambda rows: (_leaf(rows, 4), rows, 0.5, None)),
    Body(_RANDOM, random_numbers, _one),
    Body(_SIZES, computed_sizes, lambda rows: (_leaf(rows, 4), _leaf(rows + 1, 4, phase=1.0))),
    Body(
        _CONSTANTS,
        constants,
        lambda rows: (_leaf(rows, 4),),
        held=(ramp(4, 4, phase=1.0), ramp(4, phase=2.0), ramp(4)),
    ),
    Body(_MODES, without_gradients, lambda rows: (_leaf(rows, 4), _leaf(4, 4, phase=1.0)), torch.no_grad),
    Body(
        _MODES,
        cast,
        lambda rows: (_leaf(rows, 4), _leaf(4, 4, phase=1.0)),
        partial(torch.autocast, "cpu", torch.bfloat16),
    ),
    Body(_MODES, inference, lambda rows: (ramp(rows, 4), ramp(rows, 4, phase=1.0)), torch.inference_mode),
)
