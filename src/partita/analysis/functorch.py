"""Nodes of a graph that run inside a torch.func transform.

Results are not cached beyond a `with` block: graphs are edited, and nodes keep their graph and its weights alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain

from torch.fx import Graph, Node

from partita._torch.operators.registry import ENDS_OF_LEVELS, STARTS_OF_LEVELS
from partita._torch.operators.schemas import nodes_by_target


def is_inside_transform(node: Node) -> bool:
    """Whether the operands of `node` may be wrapped by a transform of torch.func."""
    found = _FOUND.get()
    if found is not None and found[0] is node.graph:
        return node in found[1]
    depth = sum(map(node.__ge__, _calls(node.graph, STARTS_OF_LEVELS)))
    return depth > sum(map(node.__gt__, _calls(node.graph, ENDS_OF_LEVELS))) if depth else False


@contextmanager
def transforms_found_once(graph: Graph) -> Iterator[None]:
    """Finds the transforms of a graph once for all queries inside; the graph must not be edited meanwhile."""
    token = _FOUND.set((graph, _nodes_inside(graph)))
    try:
        yield
    finally:
        _FOUND.reset(token)


def _calls(graph: Graph, functions: frozenset[object]) -> Iterable[Node]:
    by_target = nodes_by_target(graph)
    return chain.from_iterable([by_target.get(("call_function", function), ()) for function in functions])


def _nodes_inside(graph: Graph) -> frozenset[Node]:
    starts, ends = (frozenset(_calls(graph, functions)) for functions in (STARTS_OF_LEVELS, ENDS_OF_LEVELS))
    inside: list[Node] = []
    depth = 0
    for node in graph.nodes if starts else ():
        depth += node in starts
        if depth > 0:
            inside.append(node)
        depth -= node in ends
    return frozenset(inside)


#: The graph that is queried, and its nodes inside transforms.
_FOUND: ContextVar[tuple[Graph, frozenset[Node]] | None] = ContextVar("transforms found", default=None)
