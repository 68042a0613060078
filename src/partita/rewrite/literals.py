"""Values in place of nodes: whoever reads a node reads a constant or a container of other nodes instead."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from partita._torch.nodes import copy_meta, map_nodes
from partita._torch.operators import OPERATORS

__all__ = ["as_node", "needs_one_object", "replace_by"]


def replace_by(node: Node, value: Any) -> None:
    """Gives `value` to everyone who reads `node`, item by item to those who take one, and erases `node`."""
    graph = node.graph
    if not isinstance(value, Node) and needs_one_object(value, node):
        with graph.inserting_before(node):
            value = as_node(graph, value, node)
    if isinstance(value, Node):
        node.replace_all_uses_with(value)
    else:
        for user in list(node.users):
            found, item = _item_taken(user, node, value)
            if found:
                replace_by(user, item)
        for user in list(node.users):
            user.args, user.kwargs = map_nodes((user.args, user.kwargs), lambda read: value if read is node else read)
    graph.erase_node(node)


def needs_one_object(value: Any, node: Node) -> bool:
    """Whether `value` must be made once, by a node, to stand for `node`.

    A literal is made anew for each reader, so none may write into it; and numbers have no methods in generated code.
    """
    if isinstance(value, Node):
        return False
    has_method_called = any(user.op == "call_method" and user.args[:1] == (node,) for user in node.users)
    return has_method_called or (_is_mutable(value) and any(map(_may_write, node.users)))


def as_node(graph: Graph, value: Any, like: Node) -> Node:
    """A node that gives `value`, with the metadata of `like`."""
    made = graph.call_function(operator.getitem, ((value,), 0))
    copy_meta(like.meta, made.meta, {})
    return made


def _item_taken(user: Node, node: Node, value: Any) -> tuple[bool, Any]:
    """Whether `user` takes a known item out of the container `value` that `node` gives, and the item."""
    if user.target is not operator.getitem or len(user.args) != 2 or user.args[0] is not node:
        return False, None
    place = user.args[1]
    is_place = isinstance(value, dict) or (isinstance(value, tuple | list) and isinstance(place, int | slice))
    try:
        return (True, value[place]) if is_place else (False, None)
    except (LookupError, TypeError):  # Then the program raises as it did, when it runs.
        return False, None


def _is_mutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    return isinstance(value, list | dict)


def _may_write(user: Node) -> bool:
    """Whether a node may change a list or dict that it is given: torch's own functions and reading an item do not."""
    if user.op == "output":
        return False
    target = user.target
    if user.op != "call_function" or target in (operator.setitem, operator.delitem):
        return True
    module = getattr(target, "__module__", None) or ""
    return not (target is operator.getitem or isinstance(target, OPERATORS) or module.split(".")[0] == "torch")
