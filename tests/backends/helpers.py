"""What the tests of backends share: graphs of single calls, fake inputs, and bodies compiled for given inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from partita.backends import Backend, Compiled
from partita.backends._torch.fake_inputs import FakeInputs, strides_of


def call(target: Any, *arguments: Any, values: Sequence[Any] = (), **keywords: Any) -> Node:
    """A call of a function, a method (by name) or a module, on as many inputs as there are "x" among its arguments."""
    graph = Graph()
    given = iter(values)

    def placed_in(item: Any) -> Any:
        if isinstance(item, list):
            return [placed_in(inner) for inner in item]
        return _input(graph, next(given, None)) if isinstance(item, str) and item == "x" else item

    placed = [placed_in(item) for item in arguments]
    keywords = {key: placed_in(item) for key, item in keywords.items()}
    root = nn.Module()
    if isinstance(target, nn.Module):
        root.part = target
        node = graph.call_module("part", tuple(placed), keywords)
    elif isinstance(target, str):
        node = graph.call_method(target, tuple(placed), keywords)
    else:
        node = graph.call_function(target, tuple(placed), keywords)
    graph.output((node,))
    # A graph knows its module by a weak reference, so the node keeps the module alive.
    node.meta["owner"] = GraphModule(root, graph)
    return next(found for found in node.meta["owner"].graph.nodes if found.name == node.name)


def _input(graph: Graph, value: Any) -> Node:
    node = graph.placeholder(f"x{len(graph.nodes)}")
    if value is not None:
        node.meta["val"] = value
    return node


def fake(values: Sequence[Any], *, symbols: bool = False) -> list[Any]:
    """Fake inputs like these; with symbols, for the first size of each tensor and for integers."""
    fakes = FakeInputs()
    return [_fake(fakes, place, value, symbols=symbols) for place, value in enumerate(values)]


def _fake(fakes: FakeInputs, place: int, value: Any, *, symbols: bool) -> Any:
    if not isinstance(value, Tensor):
        return fakes.number(value, place) if symbols and type(value) is int else value
    sizes = [fakes.size(size, (place, axis)) if symbols and not axis else size for axis, size in enumerate(value.shape)]
    strides = strides_of(tuple(value.shape), value.stride(), sizes)
    looks = {"dtype": value.dtype, "device": value.device, "requires_grad": value.requires_grad}
    return fakes.tensor(sizes, strides, **looks, is_leaf=value.is_leaf)


def compiled(
    backend: Backend, function: Callable[..., Any], values: Sequence[Any], *, symbols: bool = False
) -> Compiled:
    """What the backend makes of a function for inputs like these."""
    return backend.compile(torch.fx.symbolic_trace(function), fake(values, symbols=symbols))
