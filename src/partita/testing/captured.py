"""Captured programs: small models as torch's own tracers record them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from partita.testing.case import Case
from partita.testing.models import Attention, Buffered, Casting, Frozen, Mixer, Structured
from partita.testing.state import ramp

__all__ = ["CAPTURES", "captured_case"]

#: From a model and its arguments to a graph and the arguments that this takes.
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


def _by_symbolic_trace(model: nn.Module, args: tuple[Any, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
    return symbolic_trace(model), args


def _by_make_fx(tracing_mode: Literal["fake", "symbolic"], *, pre_dispatch: bool) -> Route:
    """A graph of overloads whose state is an argument; toggles are in it if traced before dispatch."""

    def trace(model: nn.Module, args: tuple[Any, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
        def call(state: dict[str, Tensor], *inputs: Any) -> Any:
            return functional_call(model, state, inputs)

        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        traced = make_fx(call, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)(state, *args)
        return traced, (state, *args)

    return trace


def _by_export(model: nn.Module, args: tuple[Any, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
    exported = torch.export.export(model, args).module()
    assert isinstance(exported, GraphModule)
    return exported, args


def _by_dynamic_export(model: nn.Module, args: tuple[Any, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(model, args, dynamic_shapes=_sized(args, rows)).module()
    assert isinstance(exported, GraphModule)
    return exported, args


def _sized(value: Any, rows: object) -> Any:
    """The structure of `value` with `rows` for the first size of every tensor."""
    if isinstance(value, dict):
        return {key: _sized(inner, rows) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_sized(inner, rows) for inner in value)
    return {0: rows}


def _by_dynamo(model: nn.Module, args: tuple[Any, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
    """Dynamo's graph with what it is called with: parameters and sizes are arguments there."""
    taken: list[tuple[GraphModule, tuple[Any, ...]]] = []

    def record(graph_module: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            taken.append((graph_module, inputs))
            raise _RecordedError

        return run

    torch.compiler.reset()
    try:
        torch.compile(model, backend=record, fullgraph=True, dynamic=True)(*args)
    except _RecordedError:
        return taken[0]
    raise AssertionError("Dynamo made no graph")


class _RecordedError(Exception):
    """Stops a model at its first graph, before that has written anything."""


_MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "Mixer": Mixer,
    "Attention": Attention,
    "Buffered": Buffered,
    "Frozen": Frozen,
    "Casting": Casting,
    "Structured": Structured,
}

_ROUTES: Mapping[str, Route] = {
    "symbolic_trace": _by_symbolic_trace,
    "make_fx": _by_make_fx("fake", pre_dispatch=True),
    "make_fx_symbolic": _by_make_fx("symbolic", pre_dispatch=False),
    "export": _by_export,
    "export_dynamic": _by_dynamic_export,
    "dynamo": _by_dynamo,
}

#: Every model by every route.
CAPTURES = tuple((model, route) for route in _ROUTES for model in _MODELS)
