"""The index: nodes and data edges of a graph as integers, built in one walk, so that analyses run on arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, repeat
from operator import ge
from typing import final

from torch.fx import Graph, Node

from partita._torch.fx.graph_writer import input_nodes
from partita._torch.toggles import TOGGLES
from partita.errors import BrokenGraphError


@final
class Index:
    """The nodes of a graph by number (their place in graph order) and the data edges between them.

    Edge `e` goes from node `sources[e]` to node `targets[e]`; the edges into node `i` are those from `starts[i]`
    up to `starts[i + 1]`, so the arrays serve whole-graph sweeps and single nodes alike.
    """

    __slots__ = ("graph", "nodes", "number", "sources", "starts", "targets")

    def __init__(self, graph: Graph, nodes: Sequence[Node] | None = None) -> None:
        """The index of a graph as it stands, or with its `nodes` in another order, where an output may be missing."""
        self.graph = graph
        if nodes is None:
            nodes = list(graph.nodes)
            _check_output(graph, nodes)
        self.nodes: Sequence[Node] = nodes
        self.number: dict[Node, int] = {}
        self.sources, counts = array("i"), array("i")
        # Most inputs of a node are shortly before it. Looked up block by block, they are still in the cache of the
        # processor; a second sweep over a large graph would fetch every entry from memory once more.
        for start in range(0, len(self.nodes), _BLOCK):
            block = self.nodes[start : start + _BLOCK]
            self.number.update(zip(block, range(start, start + len(block)), strict=True))
            read = list(map(input_nodes, block))
            counts.extend(map(len, read))
            try:
                self.sources.extend(map(self.number.__getitem__, chain.from_iterable(read)))
            except KeyError as unknown:
                raise _bad_input(self.nodes) from unknown
        self.targets = array("i", chain.from_iterable(map(repeat, range(len(counts)), counts)))
        self.starts = array("i", accumulate(counts, initial=0))
        if any(map(ge, self.sources, self.targets)):
            raise _bad_input(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def inputs(self, i: int) -> array[int]:
        """The numbers of the inputs of node `i`, in argument order."""
        return self.sources[self.starts[i] : self.starts[i + 1]]

    def edges(self) -> Iterator[tuple[int, int]]:
        """Every data edge as (producer, consumer), grouped by consumer in graph order."""
        return zip(self.sources, self.targets, strict=True)


def index_of_edited(graph: Graph) -> Index:
    """The index of a graph that may be in the middle of an edit: its nodes in the order in which they could run.

    A node that stands before one of its inputs moves right behind it, and the output, if there is one, comes last. A
    graph with mode toggles is rejected instead, since the move could change the mode of a node.
    """
    try:
        return Index(graph)
    except BrokenGraphError:
        nodes = list(graph.nodes)
        outputs = [node for node in nodes if node.op == "output"]
        calls = [node for node in nodes if node.op != "output"]
        order = _earliest_first(calls)
        if len(outputs) > 1 or len(order) != len(calls):
            raise
        if order != calls and any(node.target in TOGGLES for node in calls if node.op == "call_function"):
            raise
        return Index(graph, [*order, *outputs])


#: How many nodes are numbered before their inputs are looked up.
_BLOCK = 256


def _earliest_first(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that can run, each after its inputs, otherwise in the original order (a stable topological sort)."""
    place = {node: at for at, node in enumerate(nodes)}
    waits = [len(input_nodes(node)) for node in nodes]
    ready = [at for at, count in enumerate(waits) if not count]
    heapify(ready)
    order: list[Node] = []
    while ready:
        node = nodes[heappop(ready)]
        order.append(node)
        for user in node.users:
            if user in place:
                waits[place[user]] -= 1
                if not waits[place[user]]:
                    heappush(ready, place[user])
    return order


def _check_output(graph: Graph, nodes: Sequence[Node]) -> None:
    outputs = graph.find_nodes(op="output")
    if len(outputs) > 1:
        names = ", ".join(repr(node.name) for node in outputs)
        raise BrokenGraphError(f"the graph has {len(outputs)} output nodes, {names}; erase all but one")
    if not nodes or nodes[-1].op != "output":
        raise BrokenGraphError(
            f"the graph does not end in an output node (it ends in {nodes[-1].name if nodes else 'nothing'!r}); "
            "give it one with `Graph.output`"
        )


def _bad_input(nodes: Sequence[Node]) -> BrokenGraphError:
    """The error for the first node with an input that is missing or comes later."""
    number = {node: place for place, node in enumerate(nodes)}
    for place, node in enumerate(nodes):
        for read in input_nodes(node):
            if read not in number:
                return BrokenGraphError(
                    f"node {node.name!r} reads {read.name!r}, which is not in this graph; "
                    "copy the graph with `Graph.node_copy`, or erase the node that reads it"
                )
            if number[read] >= place:
                return BrokenGraphError(
                    f"node {node.name!r} reads {read.name!r} before it is computed; "
                    f"move {read.name!r} up, for example with `Node.prepend`"
                )
    raise AssertionError("a bad input was reported but none exists")
