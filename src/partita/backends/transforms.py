"""Transforms: nodes of a graph that run between the start and the end of a torch.func transform."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch.fx import Graph, Node

from partita._torch.functorch_levels import ENDS_OF_LEVELS, STARTS_OF_LEVELS
from partita._torch.schemas import nodes_by_target

__all__ = ["is_inside_transform"]


def is_inside_transform(node: Node) -> bool:
    """Whether tensors that `node` meets may be wrapped by a transform of torch.func."""
    return node in _nodes_inside(node.graph)


def _nodes_inside(graph: Graph) -> frozenset[Node]:
    """All of them, found in one walk that is kept as long as the graph has as many nodes."""
    count = len(graph.nodes)
    known = _INSIDE.get(graph)
    if known is None or known[0] != count:
        known = _INSIDE[graph] = (count, _walked(graph))
    return known[1]


def _walked(graph: Graph) -> frozenset[Node]:
    if not any(nodes_by_target(graph).get(("call_function", start)) for start in STARTS_OF_LEVELS):
        return frozenset()
    inside: list[Node] = []
    depth = 0
    for node in graph.nodes:
        if node.op == "call_function" and node.target in STARTS_OF_LEVELS:
            depth += 1
        if depth:
            inside.append(node)
        if node.op == "call_function" and node.target in ENDS_OF_LEVELS:
            depth -= 1
    return frozenset(inside)


_INSIDE: WeakKeyDictionary[Graph, tuple[int, frozenset[Node]]] = WeakKeyDictionary()
