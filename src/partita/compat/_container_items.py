"""Items of what may be a container: torch's partitioner keeps a getitem beside its source if nothing else reads that.

`torch.max(x, 0)` gives a tuple and `torch.max(x)` a tensor. In a graph without traced values nobody knows which it is,
and a tuple that crosses a border whole is more than a compiler takes.
"""

from __future__ import annotations

import operator

from torch.fx import Node

from partita._torch.containers import may_return_container
from partita.graphs.program import Program
from partita.graphs.values import value_of

__all__ = ["possible_items"]


def possible_items(program: Program) -> dict[Node, Node]:
    """Each getitem that the program does not know to take out an item, with the node whose container it may be from."""
    known = frozenset(program.index.nodes[number] for number in program.projections)
    found: dict[Node, Node] = {}
    for node in program.graph.find_nodes(op="call_function", target=operator.getitem):
        source = node.args[0]
        if node in known or not isinstance(source, Node) or not all(map(_takes_item, source.users)):
            continue
        if source in found:
            found[node] = found[source]
        elif _may_be_container(source):
            found[node] = source
    return found


def _may_be_container(node: Node) -> bool:
    if node.op in ("call_module", "placeholder"):
        return value_of(node) is None
    is_call = node.op in ("call_function", "call_method") and node.target is not operator.getitem
    return is_call and value_of(node) is None and may_return_container(node.target)


def _takes_item(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int)
