"""Later writes: which values of a region somebody outside of it writes to.

A compiler may keep an output for the backward pass where plain torch keeps something else.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.fx import GraphModule, Node

from partita.graphs.aliasing import storages_of, written_classes
from partita.graphs.behaviours import Behaviours
from partita.graphs.index import Index

__all__ = ["names_written_outside"]


def names_written_outside(nodes: Collection[Node]) -> frozenset[str]:
    """The names of those of these nodes, all of one graph, whose memory other nodes of the graph may write."""
    first = next(iter(nodes), None)
    root = None if first is None else first.graph.owning_module
    if not isinstance(root, GraphModule):
        return frozenset()
    found = _KNOWN.get(root)
    if found is None or found.graph_size != len(root.graph.nodes):
        found = _KNOWN[root] = _writers_of(root)
    if not found.writers:
        return frozenset()
    inside = {node.name for node in nodes}
    return frozenset(name for name in inside if found.writers.get(found.classes.get(name, -1), inside) - inside)


class _Writers(NamedTuple):
    """The names of the nodes that write each storage class, and the class of each node by name."""

    writers: dict[int, set[str]]
    classes: dict[str, int]
    graph_size: int


#: Regions of one program ask one after the other.
_KNOWN: WeakKeyDictionary[nn.Module, _Writers] = WeakKeyDictionary()


def _writers_of(root: GraphModule) -> _Writers:
    behaviours = Behaviours(root)
    acting, size = behaviours.acting(root.graph), len(root.graph.nodes)
    if not any(told.writes for told in acting.values()):
        return _Writers({}, {}, size)
    index = Index(root.graph)
    storages = storages_of(index, behaviours, acting)
    writers: dict[int, set[str]] = {}
    for number, classes in written_classes(index, storages, acting).items():
        for written in classes:
            writers.setdefault(storages.find(written), set()).add(index.nodes[number].name)
    classes_of = {node.name: storages.find(number) for number, node in enumerate(index.nodes)}
    return _Writers(writers, classes_of, size)
