"""Projections: nodes that only take an item out of a container; they access no memory and belong to its producer."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.nn_modules import StandsForBody, runs_its_graph
from partita._torch.operator_schemas import OPERATORS, has_process_lifetime, returns_container
from partita.analysis.index import Index
from partita.analysis.nodes import value_of


def projections_of(index: Index, root: nn.Module) -> dict[int, int]:
    """The projections of a graph, in graph order, and the node of each container; other nodes are not visited."""
    mutated: dict[Node, bool] = {}
    found = []
    for target in (operator.getitem, getattr):
        for node in index.graph.find_nodes(op="call_function", target=target, sort=False):
            if is_projection(node, root, mutated):
                found.append(index.number[node])
    return {number: index.sources[index.starts[number]] for number in sorted(found)}


def is_projection(node: Node, root: nn.Module | None = None, mutated: dict[Node, bool] | None = None) -> bool:
    """Whether `node` only takes one item, at a constant place, out of a container that is never mutated."""
    return takes_item(node, root) and not _is_mutated(node.all_input_nodes[0], {} if mutated is None else mutated)


def takes_item(node: Node, root: nn.Module | None = None) -> bool:
    """Whether `node` takes one item, at a constant place, out of a container that another node returns."""
    if node.op != "call_function" or len(node.args) != 2:
        return False
    source, place = node.args
    if not isinstance(source, Node) or not isinstance(place, int | str):
        return False
    if node.target is operator.getitem:
        return isinstance(place, int) and _returns_container(source, root)
    return node.target is getattr and isinstance(place, str) and isinstance(value_of(source), tuple)


def _is_mutated(source: Node, known: dict[Node, bool]) -> bool:
    """Whether the container itself may be mutated, so that an item depends on when it is taken."""
    if source not in known:
        known[source] = not all(map(_only_reads, source.users))
    return known[source]


def _only_reads(user: Node) -> bool:
    """Whether a user does not mutate a list; operators and tensor methods never do, other functions may."""
    if user.op == "call_function":
        return user.target not in _MUTATORS and (
            user.target in (operator.getitem, getattr) or _is_of_torch(user.target)
        )
    return user.op == "output" or (user.op == "call_method" and user.target not in _MUTATORS)


def _is_of_torch(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return isinstance(target, OPERATORS) or (
        has_process_lifetime(target) and module.split(".")[0] in ("torch", "_operator", "builtins")
    )


#: Functions and methods that mutate a list or dict.
_MUTATORS = frozenset(
    (
        operator.setitem,
        operator.delitem,
        operator.iadd,
        operator.imul,
        operator.iconcat,
        operator.ior,
        *["append", "extend", "insert", "pop", "popitem", "remove", "clear", "sort", "reverse", "update", "setdefault"],
        *["__setitem__", "__delitem__", "__iadd__", "__imul__", "__ior__"],
    )
)


def _returns_container(node: Node, root: nn.Module | None) -> bool:
    value = value_of(node)
    if value is not None:
        return isinstance(value, tuple | list)
    if node.op == "call_module":
        return _module_returns_container(node, root)
    if node.target is getattr:
        return node.args[1:] == ("shape",)
    return node.op in ("call_function", "call_method") and returns_container(node.target)


def _module_returns_container(node: Node, root: nn.Module | None) -> bool:
    """Whether a module is a body whose graph returns a container."""
    body = None if root is None else root.get_submodule(str(node.target))
    if isinstance(body, StandsForBody):
        body = body.body
    return (
        isinstance(body, GraphModule)
        and runs_its_graph(body)
        and isinstance(body.graph.output_node().args[0], tuple | list)
    )


def with_items(nodes: Iterable[Node], inside: Collection[Node]) -> dict[Node, None]:
    """These nodes; an operator that returns a tuple comes with all its items, and each item with its operator.

    Where only the operator is marked as saved, torch's min-cut partitioner (2.13) finds no cut, and where only items
    are, it recomputes them with the operator.
    """
    found: dict[Node, None] = {}
    for node in nodes:
        while takes_item(node) and node.all_input_nodes[0] in inside:
            node = node.all_input_nodes[0]
        pending = [] if node in found else [node]
        while pending:
            container = pending.pop()
            found[container] = None
            pending += [user for user in container.users if user in inside and takes_item(user)]
    return found
