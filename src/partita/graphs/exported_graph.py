"""The graph of an exported program as torch wants it: saved, loaded and unflattened, it stays the same program."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch.fx import Graph, GraphModule, Node

from partita._torch.lazy_modules import lazy_module
from partita._torch.nodes import GraphWriter
from partita._torch.unread_nodes import keep_unread_nodes
from partita.graphs.attributes import attribute_of
from partita.graphs.module_stacks import settle_stacks

__all__ = ["exported_graph"]

_NUMBER = re.compile(r"_\d+$")


def exported_graph(graph_module: GraphModule, *, taken: Collection[str]) -> tuple[Graph, dict[str, Any]]:
    """A copy of a graph with the same node names, and what its nodes read, by target.

    Bodies are copied too, since `ExportedProgram.module` removes nodes from them. They move where they lie under a
    name that is `taken`, or like that of a node: torch.export.load calls the node that reads a body by its attribute,
    and leaves two nodes of one name behind.
    """
    graph, attributes = _Copying().copied(graph_module, taken)
    settle_stacks(graph)
    return graph, attributes


class _Copying:
    """The copies of bodies so far; a body that is read twice is one body afterwards."""

    def __init__(self) -> None:
        self.bodies: dict[GraphModule, GraphModule] = {}

    def copied(self, source: GraphModule, taken: Collection[str] = ()) -> tuple[Graph, dict[str, Any]]:
        graph = _copy_of(source.graph)
        unsafe = {*taken, *(_base(node.name) for node in graph.nodes if not _reads(node) and not _calls_body(node))}
        used = set(unsafe)
        names: dict[str, str] = {}
        attributes: dict[str, Any] = {}
        for node in filter(_reads, graph.nodes):
            path, value = str(node.target), attribute_of(source, node)
            if path not in names:
                moves = _is_unsafe(path, unsafe) if isinstance(value, GraphModule) else "." in path
                names[path] = _free(node.name, used) if moves else path
                attributes[names[path]] = self._own(value)
                used.add(names[path])
            node.target = names[path]
        return graph, attributes

    def _own(self, value: Any) -> Any:
        if not isinstance(value, GraphModule):
            return value
        if value not in self.bodies:
            graph, attributes = self.copied(value)
            keep_unread_nodes(graph)
            made = lazy_module(graph, training=value.training, is_part=True)
            made.meta.update(value.meta)
            for name, attribute in attributes.items():
                setattr(made, name, attribute)
            self.bodies[value] = made
        return self.bodies[value]


def _copy_of(graph: Graph) -> Graph:
    # A deep copy would rename nodes that are called like something of Python's, `input` for example.
    writer = GraphWriter(graph._tracer_cls)
    nodes = list(graph.nodes)
    names = [node.name for node in nodes]
    writer.names.reserve(names)
    writer.copy_run(nodes, {}, names)
    return writer.close()


def _reads(node: Node) -> bool:
    return node.op in ("get_attr", "call_module")


def _calls_body(node: Node) -> bool:
    """Whether a node calls a body, and so keeps no name of its own when it is loaded."""
    return any(isinstance(value, Node) and value.op == "get_attr" for value in node.args)


def _is_unsafe(path: str, unsafe: Collection[str]) -> bool:
    return "." in path or path in unsafe or _base(path) in unsafe


def _base(name: str) -> str:
    """A name without its number, since a loader that finds it taken counts on from there."""
    return _NUMBER.sub("", name)


def _free(name: str, unsafe: Collection[str]) -> str:
    while _is_unsafe(name, unsafe):
        name += "_"
    return name
