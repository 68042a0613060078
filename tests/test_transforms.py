"""Which nodes of a graph are inside a torch.func transform: as the graph is now, and with nothing kept of it."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn
from torch._functorch.predispatch import _vmap_decrement_nesting, _vmap_increment_nesting
from torch.fx import Graph, GraphModule, Node

from partita import Program
from partita.backends.transforms import is_inside_transform, transforms_found_once
from partita.policies import ByCapability


def vectorized() -> GraphModule:
    """A sine outside, a cosine inside a transform, a tangent inside of two, and an exponential after them."""
    graph = Graph()
    x = graph.call_function(torch.sin, (graph.placeholder("x"),))
    graph.call_function(_vmap_increment_nesting, (3, "error"))
    x = graph.call_function(torch.cos, (x,))
    graph.call_function(_vmap_increment_nesting, (3, "error"))
    x = graph.call_function(torch.tan, (x,))
    graph.call_function(_vmap_decrement_nesting)
    x = graph.call_function(torch.neg, (x,))
    graph.call_function(_vmap_decrement_nesting)
    graph.output(graph.call_function(torch.exp, (x,)))
    return GraphModule(nn.Module(), graph)


def names_inside(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if is_inside_transform(node) and "nesting" not in node.name]


def test_nodes_between_start_and_end_are_inside() -> None:
    graph = vectorized().graph
    assert names_inside(graph) == ["cos", "tan", "neg"]
    with transforms_found_once(graph):
        assert names_inside(graph) == ["cos", "tan", "neg"]


def test_an_edit_is_seen_at_once() -> None:
    graph = vectorized().graph
    assert names_inside(graph) == ["cos", "tan", "neg"]
    by_name: dict[str, Node] = {node.name: node for node in graph.nodes}
    by_name["neg"].append(by_name["_vmap_increment_nesting"])
    assert names_inside(graph) == ["tan"]


def test_a_graph_that_a_backend_was_asked_about_is_freed() -> None:
    module = vectorized()
    graph, owner = weakref.ref(module.graph), weakref.ref(module)
    assert len(ByCapability("aot_eager")(Program.of(module))) == 2
    del module
    gc.collect()
    assert graph() is None
    assert owner() is None
