"""The order of chosen nodes, and whether they can run as one: by data, and by the effects of their graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

from torch.fx import Graph, GraphModule, Node

from partita._torch.nodes import input_nodes
from partita.compat._fused_groups import FusionError
from partita.errors import BrokenGraphError
from partita.graphs.followers import Followers, followers_of
from partita.graphs.program import program_being_edited

__all__ = ["is_convex", "sorted_nodes"]


def sorted_nodes(nodes: Iterable[Node], followers: Followers | None = None) -> list[Node]:
    """The nodes after all that they read and stay behind; where there is a choice, in the order in which they came.

    `followers` are found where they are not given.
    """
    held = list(nodes)
    if _is_in_graph_order(held):
        return held
    if followers is None:
        followers = _followers_in(held[0].graph)
    waits = dict.fromkeys(held, 0)
    place = {node: at for at, node in enumerate(held)}
    after = {node: [*node.users, *followers.get(node, ())] for node in held}
    for found in after.values():
        for node in found:
            if node in waits:
                waits[node] += 1
    ready = [(at, node) for node, at in place.items() if not waits[node]]
    heapify(ready)
    order: list[Node] = []
    while ready:
        _, node = heappop(ready)
        order.append(node)
        for follower in after[node]:
            if follower in waits:
                waits[follower] -= 1
                if not waits[follower]:
                    heappush(ready, (place[follower], follower))
    if len(order) != len(held):
        raise FusionError(
            "topological sorted nodes doesn't have same length as input nodes: "
            f"{len(held)} were given, {len(order)} can be sorted; name each node once"
        )
    return order


def is_convex(nodes: Sequence[Node]) -> bool:
    """Whether nothing outside must run between the nodes."""
    if not nodes:
        return True
    inside, followers = set(nodes), _followers_in(nodes[0].graph)
    seen: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        for after in (*node.users, *followers.get(node, ())):
            if after in inside:
                if node not in inside:
                    return False
            elif after not in seen:
                seen.add(after)
                waiting.append(after)
    return True


def _followers_in(graph: Graph) -> Followers:
    """Who stays behind whom in a graph by its effects; nobody where the graph has no module, or cannot run as it is."""
    root = graph.owning_module
    if not isinstance(root, GraphModule) or root.graph is not graph:
        return {}
    try:
        return followers_of(program_being_edited(root))
    except BrokenGraphError:
        return {}


def _is_in_graph_order(nodes: Sequence[Node]) -> bool:
    """Whether the nodes already stand in an order that obeys everything, because their graph does."""
    if any(node._erased or node.graph is not nodes[0].graph for node in nodes):
        return False
    if not all(before < after for before, after in pairwise(nodes)):
        return False
    return all(read < node for node in nodes for read in input_nodes(node))
