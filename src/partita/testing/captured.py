"""Captured programs: small models with what makes graphs hard to cut, recorded by torch's own tracers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from partita.testing.generator.draft import Case
from partita.testing.generator.state import ramp

#: From a model and its arguments to a graph and the arguments of the graph.
Route: TypeAlias = Callable[[nn.Module, tuple[Any, ...]], tuple[GraphModule, tuple[Any, ...]]]


def captured_case(model: str, route: str) -> Case:
    """The named model captured by the named route; `CAPTURES` lists the pairs."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        graph_module, args = _ROUTES[route](_prepared(model), _arguments(model))
    return Case(graph_module, args, {}, (f"model.{model}", f"capture.{route}"), f"captured_case({model!r}, {route!r})")


def _prepared(name: str) -> nn.Module:
    model = _MODELS[name]()
    with torch.no_grad():
        for phase, parameter in enumerate(model.parameters()):
            parameter.copy_(ramp(*parameter.shape, phase=phase))
    return model


def _arguments(name: str) -> tuple[Any, ...]:
    x = ramp(4, 6)
    return (x, {"parts": [ramp(4, 6, phase=1.0), ramp(4, 6, phase=2.0)]}) if name == "Structured" else (x,)


def _by_make_fx(tracing_mode: Literal["fake", "symbolic"], *, pre_dispatch: bool) -> Route:
    """A graph of overloads whose state is an argument; toggles are in it if traced before dispatch."""

    def trace(model: nn.Module, args: tuple[Any, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
        def call(state: dict[str, Tensor], *inputs: Any) -> Any:
            return functional_call(model, state, inputs)

        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        traced = make_fx(call, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)(state, *args)
        return traced, (state, *args)

    return trace


def _by_export(*, dynamic: bool) -> Route:
    def trace(model: nn.Module, args: tuple[Any, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
        shapes = _sized(args, torch.export.Dim("rows", min=2, max=64)) if dynamic else None
        exported = torch.export.export(model, args, dynamic_shapes=shapes).module()
        assert isinstance(exported, GraphModule)
        return exported, args

    return trace


def _sized(value: Any, rows: object) -> Any:
    """The structure of `value` with `rows` for the first size of every tensor."""
    if isinstance(value, dict):
        return {key: _sized(inner, rows) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_sized(inner, rows) for inner in value)
    return {0: rows}


def _by_dynamo(model: nn.Module, args: tuple[Any, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
    """Dynamo's graph with its arguments, which include parameters and sizes."""
    recorded: list[tuple[GraphModule, tuple[Any, ...]]] = []

    def record(graph_module: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            recorded.append((graph_module, inputs))
            raise _RecordedError

        return run

    torch.compiler.reset()
    try:
        torch.compile(model, backend=record, fullgraph=True, dynamic=True)(*args)
    except _RecordedError:
        return recorded[0]
    raise AssertionError("Dynamo made no graph")


class _RecordedError(Exception):
    """Stops a model at its first graph, before it mutates anything."""


class Mixer(nn.Module):
    """Batch norm, dropout, an in-place activation and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.batch = nn.BatchNorm1d(6)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.25)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.relu(self.batch(self.first(x))))
        return torch.add(x, self.second(hidden))


class Attention(nn.Module):
    """Sizes that are read, computed with and used in views."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 18)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.size(0)
        query, key, value = self.project(self.norm(x)).chunk(3, dim=-1)
        query, key, value = (part.reshape(rows, 2, 3).transpose(0, 1) for part in (query, key, value))
        mixed = functional.softmax(query @ key.transpose(1, 2), dim=-1) @ value
        return x + mixed.transpose(0, 1).reshape(rows, x.shape[1]), mixed


class Buffered(nn.Module):
    """A buffer that is mutated, read, and mutated through a view."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        before = x + self.seen
        with torch.no_grad():
            self.seen.mul_(0.5)
            self.seen[:3].add_(x.detach().mean(0)[:3])
        return before * self.seen.tanh() + torch.rand_like(x)


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)


class Frozen(_TwoLayers):
    """A block without gradients between two that have them."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        with torch.no_grad():
            target = self.second(hidden).sin()
        return torch.add(x, self.second(hidden + target))


class Casting(_TwoLayers):
    """Autocast with a block without gradients inside it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.first(x)
            with torch.no_grad():
                scale = self.second(x).sigmoid()
            hidden = hidden * scale
        return torch.add(x, hidden.float())


class Structured(nn.Module):
    """A nested input and a nested output, an input that is mutated and one that is returned."""

    def forward(self, x: Tensor, more: dict[str, list[Tensor]]) -> dict[str, object]:
        first, second = more["parts"]
        view = first.view(-1)
        view.mul_(0.5)
        return {"sum": x + first, "same": second, "pair": (x.sin(), [first[0], None])}


_MODELS: Mapping[str, Callable[[], nn.Module]] = {
    model.__name__: model for model in (Mixer, Attention, Buffered, Frozen, Casting, Structured)
}

_ROUTES: Mapping[str, Route] = {
    "symbolic_trace": lambda model, args: (symbolic_trace(model), args),
    "make_fx": _by_make_fx("fake", pre_dispatch=True),
    "make_fx_symbolic": _by_make_fx("symbolic", pre_dispatch=False),
    "export": _by_export(dynamic=False),
    "export_dynamic": _by_export(dynamic=True),
    "dynamo": _by_dynamo,
}

#: Every model by every route.
CAPTURES = tuple((model, route) for route in _ROUTES for model in _MODELS)
