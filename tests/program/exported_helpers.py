"""Small models with everything that an exported program can hold, and the programs that torch.export makes of them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from partita import Policy, Program, Treatment, plan
from partita.policies import AroundOperators, ByLabel, ByMode, ByModule, BySize, SplitAt
from partita.treatments import Call, Mode

#: As torch.export writes a program down, or with mutations as outputs, which is what decomposing gives.
Dialect = Literal["training", "decomposed"]


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Answer:
    score: Tensor
    extra: dict[str, Tensor]


pytree._register_namedtuple(Pair, serialized_type_name="partita_tests.Pair")
torch.export.register_dataclass(Answer, serialized_type_name="partita_tests.Answer")


class Model(nn.Module):
    """Two layers, a weight, two buffers and a constant, and a function that says what to do with them."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("fleeting", torch.arange(4.0), persistent=False)
        self.constant = torch.full((4,), 2.0)
        self.does = does

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(self, *args, **kwargs)


class Tied(nn.Module):
    """One parameter under two names, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(torch.tanh(self.embedding(ids)))


class Twice(nn.Module):
    """A block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.block(torch.relu(self.block(x)))


def rows() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Case:
    """A model, the arguments that it is exported with, and the sizes that are left open."""

    build: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]] = lambda: (rows(),)
    kwargs: Callable[[], dict[str, Any]] = dict
    shapes: Any = None

    def exported(self, dialect: Dialect = "training", **options: Any) -> ExportedProgram:
        """A new exported program, with state of its own."""
        exported = torch.export.export(
            self.build(), self.args(), self.kwargs() or None, dynamic_shapes=self.shapes, **options
        )
        return exported if dialect == "training" else exported.run_decompositions({})


def case_of(does: Callable[..., Any], *more: Callable[[], Any], **options: Any) -> Case:
    return Case(lambda: Model(does), lambda: (rows(), *(make() for make in more)), **options)


def chain(m: Model, x: Tensor) -> Any:
    return m.second(torch.tanh(m.first(x)) * m.weight + m.fleeting)


def structures(m: Model, x: Tensor) -> Any:
    y = m.first(x)
    return {"pair": Pair(y, y * 2), "nested": (y.sum(), [m.second(y), {"deep": y + 1}])}


def dataclasses(m: Model, x: Tensor) -> Any:
    y = m.first(x)
    return Answer(m.second(y), {"b": y.relu(), "a": y + 1})


def constants(m: Model, x: Tensor) -> Any:
    return m.first(x), None, 3, (None, 2.5, True)


def repeated(m: Model, x: Tensor) -> Any:
    y = m.second(m.first(x))
    return y, x, m.weight, y, m.count, y + m.constant


def writes_buffer(m: Model, x: Tensor) -> Any:
    y = m.first(x)
    with torch.no_grad():
        m.count.add_(y.sum(0))
    return m.second(y) + m.count


def only_writes(m: Model, x: Tensor) -> Any:
    m.count.add_(1)
    y = m.first(x)
    m.count.mul_(2)
    return m.second(y)


def writes_input(m: Model, x: Tensor, seen: Tensor) -> Any:
    y = m.first(x)
    seen.add_(y.detach())
    return m.second(y) * seen.sum()


def keywords(m: Model, x: Tensor, *, scale: Tensor, shift: Tensor) -> Any:
    return m.second(m.first(x) * scale + shift)


def unused(m: Model, x: Tensor, ignored: Tensor, number: int, nothing: None) -> Any:
    return m.second(m.first(x)) * number


def sizes(m: Model, x: Tensor) -> Any:
    y = m.first(x).reshape(-1)
    return y.reshape(x.shape[0], 4) * x.shape[0], x.shape[0] * 2


def number_input(m: Model, x: Tensor, n: int) -> Any:
    return m.second(m.first(x) * n), n + 1


def item(m: Model, x: Tensor) -> Any:
    n: Any = (x > 0).sum().item()
    torch._check(n >= 0)
    torch._check(n <= 12)
    return m.second(m.first(x)).sum() * torch.ones(n).sum()


def nonzero(m: Model, x: Tensor) -> Any:
    return torch.nonzero(m.first(x)).to(x.dtype).sum() * m.second(x).sum()


def asserts(m: Model, x: Tensor) -> Any:
    torch._assert_async((x < 100).all(), "too large")
    return m.second(m.first(x))


def dropout(m: Model, x: Tensor) -> Any:
    return m.second(nn.functional.dropout(m.first(x), 0.5, training=True))


def modes(m: Model, x: Tensor) -> Any:
    with torch.no_grad():
        scale = m.second(x)
        m.count.add_(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.first(x)
        with torch.autocast("cpu", enabled=False):
            y = m.second(y.float())
    return m.first(y) * scale


def cond(m: Model, x: Tensor) -> Any:
    y = m.first(x)
    z = torch.cond(y.sum() > 0, lambda v: m.second(v).sin(), lambda v: m.second(v).cos(), (y,))
    return torch.tanh(z)


def loops(m: Model, x: Tensor) -> Any:
    from torch._higher_order_ops.map import map as map_operator
    from torch._higher_order_ops.while_loop import while_loop

    mapped = map_operator(lambda row, w: row * w + 1, m.first(x), m.weight)
    _, y = while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 0.5), (torch.tensor(0), mapped.detach()))
    return m.second(y) + mapped


@torch.library.custom_op("partita_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: grad * 2)


@torch.library.custom_op("partita_tests::accumulate", mutates_args={"into"})
def accumulate(x: Tensor, into: Tensor) -> None:
    into.add_(x)


def custom(m: Model, x: Tensor) -> Any:
    y = doubled(m.first(x))
    accumulate(y.detach().sum(0), m.count)
    return m.second(y) + m.count


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


CASES: Mapping[str, Case] = {
    **{
        does.__name__: case_of(does)
        for does in (chain, structures, dataclasses, constants, repeated, writes_buffer, only_writes, modes)
    },
    **{does.__name__: case_of(does) for does in (item, nonzero, asserts, dropout, custom, cond, loops)},
    "writes_input": case_of(writes_input, lambda: torch.zeros(3, 4)),
    "keywords": case_of(keywords, kwargs=lambda: {"scale": torch.full((4,), 0.5), "shift": torch.ones(4)}),
    "unused": case_of(unused, lambda: torch.ones(2), lambda: 3, lambda: None),
    "sizes": case_of(sizes, shapes=(({0: Dim("rows", min=2, max=64)},),)),
    "number_input": case_of(number_input, lambda: 5, shapes=((None, Dim.DYNAMIC),)),
    "normalised": Case(normalised),
    "tied": Case(Tied, lambda: (torch.tensor([[1, 2, 3]]),)),
    "twice": Case(Twice),
}


def original(name: str, dialect: Dialect = "training") -> ExportedProgram:
    """One exported program for all tests of a case: none of them may change it."""
    return _original(name) if dialect == "training" else _decomposed(name)


@cache
def _original(name: str) -> ExportedProgram:
    return CASES[name].exported()


@cache
def _decomposed(name: str) -> ExportedProgram:
    return _original(name).run_decompositions({})


def _label(node: Node) -> str | None:
    """One region of the first layer, which is called like that layer's module."""
    return "first" if node.name == "linear" else None


LINEAR = torch.ops.aten.linear.default
CUTS: Mapping[str, tuple[Policy, Treatment]] = {
    "one part": (BySize(parts=1), Call()),
    "two parts": (BySize(parts=2), Call()),
    "every operator": (BySize(operators=1), Call()),
    "by parameters": (BySize(parameter_bytes=80), Call()),
    "by module": (ByModule(depth=1), Call()),
    "by mode": (ByMode(), Mode()),
    "mixed modes": (BySize(parts=2), Mode()),
    "in sequence": (SplitAt(lambda node: node.target is LINEAR), Call()),
    "around layers": (AroundOperators(LINEAR), Call()),
    "by label": (ByLabel(_label), Call()),
}


def cut(program: Program | ExportedProgram, how: str) -> Program:
    """A program after one of the cuts."""
    policy, treatment = CUTS[how]
    return plan(Program.of(program), policy, treatment).apply()


def reloaded(exported: ExportedProgram) -> ExportedProgram:
    """A program after it was saved and loaded."""
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file)
