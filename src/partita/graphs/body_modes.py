"""Bodies that a graph calls, and the modes that they leave behind."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from partita.errors import ModeError
from partita.graphs.attributes import find
from partita.graphs.index import Index
from partita.graphs.modes import AMBIENT, Mode, Modes, has_toggles, modes_of

__all__ = ["check_bodies"]

#: A body that ends by switching grad mode on has closed a no_grad block, as far as anyone can tell.
_CLOSED = Mode(grad=True)


def check_bodies(index: Index, root: nn.Module, modes: Modes) -> None:
    """Raises where a call leaves a mode switched for the nodes after it: modes are told by the toggles in the graph."""
    graph = index.graph
    for node in (*graph.find_nodes(op="call_module", sort=False), *graph.find_nodes(op="get_attr", sort=False)):
        body = find(root, str(node.target))
        if not isinstance(body, GraphModule):
            continue
        inner = Index(body.graph)
        inside = modes_of(inner)
        if has_toggles(body.graph):
            left = inside.final
            calls = (node,) if node.op == "call_module" else node.users
            called_without = any(modes.at(index.number[call]).grad is False for call in calls)
            if left != AMBIENT and (left != _CLOSED or called_without):
                raise ModeError(
                    f"the body {node.target!r} of node {node.name!r} leaves {left} behind for everything after it; "
                    "close its blocks"
                )
        check_bodies(inner, body, inside)
