"""Captured programs: small models as torch's own tracers record them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from partita.testing.case import Case
from partita.testing.models import Attention, Buffered, Casting, Frozen, Mixer, Structured
from partita.testing.state import ramp

__all__ = ["CAPTURES", "captured_case"]


def captured_case(model: str, route: str) -> Case:
    """The named model captured by the named route; `CAPTURES` lists the pairs that torch can do."""
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


def _by_make_fx(tracing_mode: str) -> Callable[[nn.Module, tuple[Any, ...]], tuple[GraphModule, tuple[Any, ...]]]:
    def trace(model: nn.Module, args: tuple[Any, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
        return make_fx(model, tracing_mode=tracing_mode)(*args), args

    return trace


def _by_export(model: nn.Module, args: tuple[Any, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
    exported = torch.export.export(model, args).module()
    assert isinstance(exported, GraphModule)
    return exported, args


def _by_dynamic_export(model: nn.Module, args: tuple[Any, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
    exported = torch.export.export(model, args, dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},)).module()
    assert isinstance(exported, GraphModule)
    return exported, args


def _by_dynamo(model: nn.Module, args: tuple[Any, ...]) -> tuple[GraphModule, tuple[Any, ...]]:
    """Dynamo's graph with what it is called with: parameters and sizes are arguments there."""
    taken: list[tuple[GraphModule, tuple[Any, ...]]] = []

    def record(graph_module: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            taken.append((graph_module, inputs))
            raise _Recorded

        return run

    torch.compiler.reset()
    try:
        torch.compile(model, backend=record, fullgraph=True, dynamic=True)(*args)
    except _Recorded:
        return taken[0]
    raise AssertionError("Dynamo made no graph")


class _Recorded(Exception):
    """Stops a model at its first graph, before that has written anything."""


_MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "Mixer": Mixer,
    "Attention": Attention,
    "Buffered": Buffered,
    "Frozen": Frozen,
    "Casting": Casting,
    "Structured": Structured,
}

_ROUTES: Mapping[str, Callable[[nn.Module, tuple[Any, ...]], tuple[GraphModule, tuple[Any, ...]]]] = {
    "symbolic_trace": _by_symbolic_trace,
    "make_fx": _by_make_fx("fake"),
    "make_fx_symbolic": _by_make_fx("symbolic"),
    "export": _by_export,
    "export_dynamic": _by_dynamic_export,
    "dynamo": _by_dynamo,
}

_IMPOSSIBLE: frozenset[tuple[str, str]] = frozenset()

#: Every model by every route that can record it.
CAPTURES = tuple((model, route) for route in _ROUTES for model in _MODELS if (model, route) not in _IMPOSSIBLE)
