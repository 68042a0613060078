"""Projections: nodes that only take an item out of a container; they touch no memory and belong to its producer."""

from __future__ import annotations

import operator

from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.containers import returns_container
from partita.graphs.index import Index
from partita.graphs.values import value_of

__all__ = ["is_projection", "projections_of"]


def projections_of(index: Index, root: nn.Module) -> tuple[int, ...]:
    """The projections of a graph by number, in graph order; other nodes are not even looked at."""
    candidates = (
        node
        for target in (operator.getitem, getattr)
        for node in index.graph.find_nodes(op="call_function", target=target, sort=False)
    )
    return tuple(sorted(index.number[node] for node in candidates if is_projection(node, root)))


def is_projection(node: Node, root: nn.Module | None = None) -> bool:
    """Whether `node` only takes one item, at a constant place, out of a container that another node gives."""
    if node.op != "call_function" or len(node.args) != 2:
        return False
    source, place = node.args
    if not isinstance(source, Node) or not isinstance(place, int | str):
        return False
    if node.target is operator.getitem:
        return isinstance(place, int) and _gives_container(source, root)
    return node.target is getattr and isinstance(place, str) and isinstance(value_of(source), tuple)


def _gives_container(node: Node, root: nn.Module | None) -> bool:
    value = value_of(node)
    if value is not None:
        return isinstance(value, tuple | list)
    if node.op == "call_module":
        return _module_gives_container(node, root)
    if node.target is getattr:
        return node.args[1:] == ("shape",)
    return node.op in ("call_function", "call_method") and returns_container(node.target)


def _module_gives_container(node: Node, root: nn.Module | None) -> bool:
    """A body that was cut out before says in its own graph what it gives."""
    body = None if root is None else root.get_submodule(str(node.target))
    return isinstance(body, GraphModule) and isinstance(body.graph.output_node().args[0], tuple | list)
