"""The index: one walk that turns a graph into integers, so that everything after it runs on arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, repeat
from operator import ge
from typing import final

from torch.fx import Graph, Node

from partita._torch.nodes import input_nodes
from partita.errors import BrokenGraphError

__all__ = ["Index"]


@final
class Index:
    """The nodes of a graph by number (their place in graph order) and the data edges between them.

    Edge `e` goes from node `sources[e]` to node `targets[e]`; the edges into node `i` are those from `starts[i]`
    up to `starts[i + 1]`, so the arrays serve whole-graph sweeps and single nodes alike.
    """

    __slots__ = ("graph", "nodes", "number", "sources", "starts", "targets")

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: Sequence[Node] = list(graph.nodes)
        self.number: dict[Node, int] = dict(zip(self.nodes, range(len(self.nodes)), strict=True))
        read = list(map(input_nodes, self.nodes))
        counts = list(map(len, read))
        try:
            self.sources = array("i", map(self.number.__getitem__, chain.from_iterable(read)))
        except KeyError as stray:
            raise _stray_input(self.nodes, self.number) from stray
        self.targets = array("i", chain.from_iterable(map(repeat, range(len(counts)), counts)))
        self.starts = array("i", accumulate(counts, initial=0))
        _check_order(self)

    def __len__(self) -> int:
        return len(self.nodes)

    def inputs(self, i: int) -> array[int]:
        """The numbers of the nodes that node `i` reads, in the order in which it mentions them."""
        return self.sources[self.starts[i] : self.starts[i + 1]]

    def edges(self) -> Iterator[tuple[int, int]]:
        """Every data edge as (producer, consumer), grouped by consumer in graph order."""
        return zip(self.sources, self.targets, strict=True)


def _stray_input(nodes: Sequence[Node], number: dict[Node, int]) -> BrokenGraphError:
    for node in nodes:
        for read in input_nodes(node):
            if read not in number:
                return BrokenGraphError(
                    f"node {node.name!r} reads {read.name!r}, which is not in this graph; "
                    "copy the graph with `Graph.node_copy`, or erase the node that reads it"
                )
    raise AssertionError("a stray input was reported but none exists")


def _check_order(index: Index) -> None:
    nodes = index.nodes
    outputs = index.graph.find_nodes(op="output")
    if len(outputs) > 1:
        names = ", ".join(repr(node.name) for node in outputs)
        raise BrokenGraphError(f"the graph has {len(outputs)} output nodes, {names}; erase all but one")
    if not nodes or nodes[-1].op != "output":
        raise BrokenGraphError(
            f"the graph does not end in an output node (it ends in {nodes[-1].name if nodes else 'nothing'!r}); "
            "give it one with `Graph.output`"
        )
    if any(map(ge, index.sources, index.targets)):
        source, target = next(edge for edge in index.edges() if edge[0] >= edge[1])
        raise BrokenGraphError(
            f"node {nodes[target].name!r} reads {nodes[source].name!r} before it is computed; "
            f"move {nodes[source].name!r} up, for example with `Node.prepend`"
        )
