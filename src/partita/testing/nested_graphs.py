"""Graphs in graphs: a program's own, and those of the bodies that its operators run, at any depth."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from torch.fx import Graph, GraphModule, Node

__all__ = ["bodies_of", "bodies_of_call", "graphs_in", "names_in", "text_of"]


def graphs_in(module: GraphModule) -> Iterator[Graph]:
    """The graph of `module`, and those of all bodies in it."""
    yield module.graph
    for body in bodies_of(module):
        yield from graphs_in(body)


def bodies_of(module: GraphModule) -> Iterator[GraphModule]:
    """The bodies that the operators of a graph run, one for each time that it is read."""
    for node in module.graph.find_nodes(op="get_attr"):
        if not node.users:
            continue
        body = attrgetter(str(node.target))(module)
        if isinstance(body, GraphModule):
            yield body


def bodies_of_call(module: GraphModule, call: Node) -> Iterator[tuple[int, GraphModule]]:
    """The bodies that one call is given, each with its place among the arguments."""
    for place, value in enumerate(call.args):
        if isinstance(value, Node) and value.op == "get_attr":
            body = attrgetter(str(value.target))(module)
            if isinstance(body, GraphModule):
                yield place, body


def names_in(module: GraphModule, path: str = "") -> Iterator[str]:
    """The names of all nodes; of those in bodies, after the calls that lead there."""
    for node in module.graph.nodes:
        yield f"{path}{node.name}"
        for place, body in bodies_of_call(module, node):
            yield from names_in(body, f"{path}{node.name}/{place}/")


def text_of(module: GraphModule) -> str:
    """All graphs as text."""
    return "\n".join(map(str, graphs_in(module)))
