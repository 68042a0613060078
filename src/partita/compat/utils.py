"""The node helpers of `torch._export.utils`, under torch's names and with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.fx import GraphModule, Node

from partita.compat._sequential_split import sequential_split
from partita.errors import BrokenGraphError
from partita.rewrite.in_place import inline_call

__all__ = [
    "node_inline_",
    "node_replace_",
    "nodes_count",
    "nodes_filter",
    "nodes_first",
    "nodes_map",
    "sequential_split",
]


Nodes = TypeVar("Nodes", bound=Iterable[Node])


def nodes_filter(nodes: Iterable[Node], node_call_back: Callable[[Node], Any]) -> list[Node]:
    """The nodes for which `node_call_back` is true, in order."""
    return [node for node in nodes if node_call_back(node)]


def nodes_first(nodes: Iterable[Node], node_call_back: Callable[[Node], Any] | None = None) -> Node | None:
    """The first node, or the first for which `node_call_back` is true; None if there is none."""
    return next((node for node in nodes if node_call_back is None or node_call_back(node)), None)


def nodes_count(nodes: Iterable[Node], node_call_back: Callable[[Node], Any]) -> int:
    """How many nodes there are for which `node_call_back` is true."""
    return len(nodes_filter(nodes, node_call_back))


def nodes_map(nodes: Nodes, node_call_back: Callable[[Node], Any]) -> Nodes:
    """The same `nodes`, after `node_call_back` was called with each in turn; it may change the graph."""
    for node in nodes:
        node_call_back(node)
    return nodes


def node_replace_(old_node: Node, new_node: Node) -> None:
    """Gives `new_node` to everyone who reads `old_node`, in place, and erases `old_node`.

    A new node that comes after a reader is moved up to it.
    """
    _check_replacement(old_node, new_node)
    early = _first_reader_before(old_node, new_node)
    if early is not None:
        early.prepend(new_node)
    old_node.replace_all_uses_with(new_node)
    old_node.graph.erase_node(old_node)


def node_inline_(call_mod_node: Node) -> GraphModule | None:
    """The module around a call of a graph module, with the nodes of that in place of the call.

    It works in place, and changes nothing where it refuses. The called module is not changed: others may call it too.
    """
    return inline_call(call_mod_node)


def _check_replacement(old_node: Node, new_node: Node) -> None:
    told = f"{old_node.name!r} cannot be replaced by {new_node.name!r}"
    if old_node is new_node:
        raise BrokenGraphError(f"{told}: they are one node")
    if old_node.graph is not new_node.graph:
        raise BrokenGraphError(f"{told}: they are in different graphs; copy it with `Graph.node_copy` first")
    if old_node._erased or new_node._erased:
        raise BrokenGraphError(f"{told}: it is not in the graph any more")
    if old_node in new_node.all_input_nodes:
        raise BrokenGraphError(f"{told}, which reads it; give it another input first")
    early = _first_reader_before(old_node, new_node)
    if early is None:
        return
    late = next((node for node in new_node.all_input_nodes if not node < early), None)
    if late is not None:
        raise BrokenGraphError(
            f"{told}: {early.name!r} reads it earlier, and what {new_node.name!r} reads comes after that; move "
            f"{late.name!r} up with `Node.prepend`"
        )
    if new_node.is_impure():
        raise BrokenGraphError(
            f"{told}: {early.name!r} reads it earlier, and {new_node.name!r} has side effects, so it keeps its place; "
            "move it up with `Node.prepend` if that is meant"
        )


def _first_reader_before(old_node: Node, new_node: Node) -> Node | None:
    """The first node that reads the old one and stands before the new one."""
    return min((user for user in old_node.users if user < new_node), default=None)
