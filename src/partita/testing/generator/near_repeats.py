"""Models of blocks that are equal but for one or two: a constant, a tied weight, a hook, a stride, a flag, ..."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Tracer
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn import functional

from partita._torch.fake_tensors import FakeCopies
from partita.capture.capture import capture
from partita.program.program import Program

_WIDTH, _ROWS = 6, 6
#: How many of the models have steps with numbers that may be inputs of a shared body.
_WITH_NUMBERS = 0.4


@final
@dataclass(frozen=True, slots=True)
class NearRepeats:
    """A model, its arguments, which blocks differ from the others and in what, and how its graph is recorded."""

    model: nn.Module
    args: tuple[Tensor, ...]
    seed: int
    differences: tuple[tuple[int, str], ...]
    route: str

    def program(self) -> Program:
        """The program of the model, recorded by the route of the case."""
        return _ROUTES[self.route](self)

    def __repr__(self) -> str:
        odd = ", ".join(f"{name} in block {at}" for at, name in self.differences) or "no block differs"
        return f"near_repeats({self.seed}): {odd}; recorded by {self.route}; {self.model}"


def near_repeats(seed: int, *, dtype: torch.dtype = torch.float32) -> NearRepeats:
    """The model of a seed: from two to six blocks of the same steps, up to two of which differ, or all in numbers."""
    source, numbers = Random(seed), Random(f"numbers {seed}")
    steps = tuple(source.choice(list(_STEPS)) for _ in range(source.randint(2, 6)))
    count = source.randint(2, 6)
    chosen = [(source.randrange(count), source.choice(list(_ODD))) for _ in range(source.choice((0, 1, 1, 2)))]
    if numbers.random() < _WITH_NUMBERS:
        steps = (*steps[:3], *(numbers.choice(list(_WITH_A_NUMBER)) for _ in range(numbers.randint(1, 3))))
        chosen = [*chosen[: numbers.randint(0, 1)], (numbers.randrange(count), numbers.choice(list(_IN_NUMBERS)))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [_Block(_Settings(steps, dtype=dtype)) for _ in range(count)]
        model = _Stack(blocks, reads_later=source.random() < 0.2, moves_strides=source.random() < 0.2).to(dtype)
        model.train(source.random() < 0.8)
        for at, name in chosen:
            DIFFERENCES[name](model, at)
        args = (torch.randn(_ROWS, _WIDTH, dtype=dtype, requires_grad=source.random() < 0.5),)
    route = source.choice(("fx", "fx", "fx with values", "fx with values", "capture"))
    return NearRepeats(model, args, seed, tuple(chosen), route)


@final
@dataclass(frozen=True, slots=True)
class _Settings:
    """What a block is made with: its steps, and the constants that they use."""

    steps: tuple[str, ...]
    eps: float = 1e-5
    p: float = 0.25
    dim: int = -1
    dtype: torch.dtype = torch.float32
    is_swapped: bool = False
    mutates: bool = False
    without_grad: bool = False
    autocast: bool = False
    #: A function with a constant inside.
    scale: Callable[[Tensor], Tensor] = field(default_factory=lambda: _scaled_by(2.0))
    #: Numbers that are inputs of a shared body where blocks differ in them, in most steps.
    factor: float = 0.5
    offset: int = 1


class _Block(nn.Module):
    """Some steps on one tensor; all blocks have the same state, whichever of it the steps use."""

    def __init__(self, settings: _Settings) -> None:
        super().__init__()
        self.settings = settings
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.weight = nn.Parameter(torch.rand(_WIDTH))
        self.register_buffer("count", torch.ones(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.settings.without_grad):
            for step in self.settings.steps:
                y = _EVERY_STEP[step](self, x, y)
        return x + y if self.settings.is_swapped else y + x


class _Stack(nn.Module):
    def __init__(self, blocks: list[_Block], *, reads_later: bool, moves_strides: bool) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(_WIDTH, _WIDTH), nn.ModuleList(blocks), nn.Linear(_WIDTH, 2)
        self.reads_later, self.moves_strides = reads_later, moves_strides

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        seen = []
        for at, block in enumerate(self.blocks):
            x = block(x)
            seen.append(x)
            if self.moves_strides and at % 2:
                x = x.t().contiguous().t()
        result = self.last(x)
        return (result, seen[0]) if self.reads_later else result

    def extra_repr(self) -> str:
        return f"reads_later={self.reads_later}, moves_strides={self.moves_strides}"


def _linear(block: _Block, x: Tensor, y: Tensor) -> Tensor:
    made: Tensor = block.up(y.to(block.settings.dtype))
    return made.to(y.dtype)


def _count(block: _Block, x: Tensor, y: Tensor) -> Tensor:
    count = block.get_buffer("count")
    if block.settings.mutates:
        count.add_(y.detach().mean(0))
    return y * count


def _cast(block: _Block, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=block.settings.autocast):
        made: Tensor = block.down(y)
        return made.to(y.dtype)


_STEPS: dict[str, Callable[[_Block, Tensor, Tensor], Tensor]] = {
    "up": _linear,
    "down": lambda block, x, y: block.down(y),
    "norm": lambda block, x, y: functional.layer_norm(y, (_WIDTH,), block.weight, None, block.settings.eps),
    "dropout": lambda block, x, y: functional.dropout(y, block.settings.p, block.training),
    "softmax": lambda block, x, y: torch.softmax(y, block.settings.dim),
    "scale": lambda block, x, y: block.settings.scale(y),
    "count": _count,
    "cast": _cast,
    "tanh": lambda block, x, y: torch.tanh(y),
    "in place": lambda block, x, y: y.clone().mul_(0.5).relu_(),
    "residual": lambda block, x, y: y - x if block.settings.is_swapped else x - y,
    "views": lambda block, x, y: y.view(2, _ROWS // 2, _WIDTH).transpose(0, 1).reshape(_ROWS, _WIDTH),
}


def _drop_path(block: _Block, x: Tensor, y: Tensor) -> Tensor:
    keep = 1 - block.settings.p
    return y.div(keep) * torch.floor(keep + torch.rand(_ROWS, 1)) if block.training else y


#: Numbers beside tensors: with dimensions and without, integers beside integers and beside other kinds.
_WITH_A_NUMBER: dict[str, Callable[[_Block, Tensor, Tensor], Tensor]] = {
    "drop path": _drop_path,
    "rms": lambda block, x, y: y * torch.rsqrt(y.square().mean(-1, keepdim=True) + block.settings.eps),
    "scaled in place": lambda block, x, y: y.clone().mul_(block.settings.factor).sub_(block.settings.offset),
    "integers": lambda block, x, y: y * (torch.arange(_WIDTH) + block.settings.offset).mul(block.settings.factor),
    "mean": lambda block, x, y: y * (y.mean() * block.settings.factor).exp(),
    "reversed": lambda block, x, y: block.settings.offset - block.settings.factor * y,
    "wide": lambda block, x, y: (y.double() / block.settings.factor + block.settings.offset).to(y.dtype),
    "narrow": lambda block, x, y: (block.settings.factor * y.bfloat16() + block.settings.eps).to(y.dtype),
    "alpha": lambda block, x, y: torch.add(y, x, alpha=block.settings.offset).sub(block.settings.factor),
}
_EVERY_STEP = {**_STEPS, **_WITH_A_NUMBER}


def _scaled_by(number: float | bool) -> Callable[[Tensor], Tensor]:  # noqa: FBT001  A constant of any type.
    return lambda tensor: tensor * number


def _halved(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output * 0.5


# Differences: what makes one block unlike the others.


Difference = Callable[[_Stack, int], None]


def _set(**changes: Any) -> Difference:
    def change(model: _Stack, at: int) -> None:
        block: Any = model.blocks[at]
        block.settings = replace(block.settings, **changes)

    return change


def _in_double_precision(model: _Stack, at: int) -> None:
    block: Any = model.blocks[at]
    block.up.double()
    _set(dtype=torch.float64)(model, at)


def _other_stride(model: _Stack, at: int) -> None:
    block: Any = model.blocks[at]
    block.up.weight = nn.Parameter(block.up.weight.detach().t().contiguous().t())


def _tied_inside(model: _Stack, at: int) -> None:
    block: Any = model.blocks[at]
    block.up.weight = block.down.weight


def _tied_to_another(model: _Stack, at: int) -> None:
    block: Any = model.blocks[at]
    block.up.weight = model.blocks[at - 1].up.weight  # type: ignore[union-attr]


def _aliased(model: _Stack, at: int) -> None:
    block: Any = model.blocks[at]
    block.up.weight = nn.Parameter(block.down.weight.detach().t())


def _frozen(model: _Stack, at: int) -> None:
    model.blocks[at].requires_grad_(requires_grad=False)


def _hooked(model: _Stack, at: int) -> None:
    block: Any = model.blocks[at]
    block.up.register_forward_hook(_halved)


def _in_evaluation(model: _Stack, at: int) -> None:
    model.blocks[at].eval()


def _called_twice(model: _Stack, at: int) -> None:
    model.blocks[at] = model.blocks[at - 1]


def _shares_its_count(model: _Stack, at: int) -> None:
    block: Any = model.blocks[at]
    block.count = model.blocks[at - 1].count
    _set(mutates=True)(model, at)


def _all_mutate(model: _Stack, at: int) -> None:
    for place in range(len(model.blocks)):
        _set(mutates=True)(model, place)


def _without_bias(model: _Stack, at: int) -> None:
    block: Any = model.blocks[at]
    block.up.bias = None


def _with_own_numbers(model: _Stack, at: int) -> None:
    """Every block has another factor, epsilon, offset and rate."""
    for place in range(len(model.blocks)):
        number = place + 1
        _set(factor=1 / number, eps=1e-5 * number, offset=place - at, p=0.1 * place)(model, place)


_ODD: dict[str, Difference] = {
    "another eps": _set(eps=1e-3),
    "another dropout": _set(p=0.5),
    "another constant in a closure": _set(scale=_scaled_by(3.0)),
    "a constant of another type": _set(scale=_scaled_by(2)),
    "a truth value as a constant": _set(scale=_scaled_by(number=True)),
    "another dimension": _set(dim=0),
    "another order of operands": _set(is_swapped=True),
    "a mutated buffer": _set(mutates=True),
    "mutated buffers in all blocks": _all_mutate,
    "a shared buffer": _shares_its_count,
    "no gradients": _set(without_grad=True),
    "autocast": _set(autocast=True),
    "another dtype": _in_double_precision,
    "another stride": _other_stride,
    "a tied weight": _tied_inside,
    "a weight of another block": _tied_to_another,
    "an aliased weight": _aliased,
    "a frozen block": _frozen,
    "a hook": _hooked,
    "evaluation": _in_evaluation,
    "the same block again": _called_twice,
    "no bias": _without_bias,
}
_IN_NUMBERS: dict[str, Difference] = {
    "another factor": _set(factor=0.75),
    "a factor that is an integer": _set(factor=1),
    "another offset": _set(offset=3),
    "numbers of their own": _with_own_numbers,
}
DIFFERENCES: dict[str, Difference] = {**_ODD, **_IN_NUMBERS}


# Routes: how the graph is recorded.


class _Expanding(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def _by_fx(case: NearRepeats) -> Program:
    graph = _Expanding().trace(case.model)
    return Program.of(GraphModule(case.model, graph))


def _by_fx_with_values(case: NearRepeats) -> Program:
    program = _by_fx(case)
    FakeTensorProp(program.graph_module, FakeCopies().mode).propagate(*deepcopy(case.args))
    return program


_ROUTES: dict[str, Callable[[NearRepeats], Program]] = {
    "fx": _by_fx,
    "fx with values": _by_fx_with_values,
    "capture": lambda case: capture(case.model, case.args),
}
