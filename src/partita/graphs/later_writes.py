"""Later writes: which values of a region somebody writes to, inside of it or outside.

A compiler may keep an output for the backward pass where plain torch keeps something else, and what is recomputed needs
its inputs as they were.
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

__all__ = [
    "forget_writers",
    "later_writer",
    "names_written",
    "names_written_outside",
    "readers_before_writes",
    "writers_of",
    "writing_nodes",
]


def names_written_outside(nodes: Collection[Node]) -> frozenset[str]:
    """The names of those of these nodes, all of one graph, whose memory other nodes of the graph may write."""
    found = _known_writers(nodes)
    if found is None:
        return frozenset()
    inside = {node.name for node in nodes}
    return frozenset(name for name in inside if found.writers.get(found.classes.get(name, -1), inside) - inside)


def names_written(nodes: Collection[Node]) -> frozenset[str]:
    """The names of those of these nodes, all of one graph, that write, or whose memory any node may write."""
    found = _known_writers(nodes)
    if found is None:
        return frozenset()
    writing = found.own.union(*found.writers.values())
    return frozenset(
        node.name for node in nodes if node.name in writing or found.classes.get(node.name, -1) in found.writers
    )


def writers_of(node: Node) -> frozenset[str]:
    """The names of the nodes that may write to the memory of this one."""
    found = _known_writers((node,))
    return frozenset() if found is None else frozenset(found.writers.get(found.classes.get(node.name, -1), ()))


def later_writer(source: Node, readers: Collection[Node]) -> str | None:
    """The first node, none of `readers`, that may write to the memory of `source` after one of them has read it."""
    found = _known_writers((source,))
    if found is None:
        return None
    first = min(found.places[node.name] for node in readers if source in node.all_input_nodes)
    inside = {node.name for node in readers}
    writers = found.writers.get(found.classes.get(source.name, -1), set()) - inside
    later = [name for name in writers if found.places[name] > first]
    return min(later, key=found.places.__getitem__, default=None)


def readers_before_writes(nodes: Collection[Node]) -> list[Node]:
    """Those of these nodes that compute something from an input or attribute which is written later.

    Whoever computes them again when the program has run must not read the same memory; views compute nothing.
    """
    found = _known_writers(nodes)
    if found is None:
        return []
    last = {
        memory: max(map(found.places.__getitem__, found.writers[memory]))
        for memory in found.held & found.writers.keys()
    }
    return [
        node
        for node in nodes
        for memory in [found.classes[source.name] for source in node.all_input_nodes]
        if last.get(memory, -1) > found.places[node.name] and found.classes[node.name] != memory
    ]


def writing_nodes(root: GraphModule) -> tuple[str, ...]:
    """The names of the nodes of a graph that may write, in order."""
    found = _known_writers(tuple(root.graph.nodes)[:1])
    if found is None:
        return ()
    return tuple(sorted(set().union(*found.writers.values()), key=found.places.__getitem__))


def forget_writers(root: GraphModule) -> None:
    """Lets the next question look at the graph anew; asked for by every new program of it, since it may be edited."""
    _KNOWN.pop(root, None)


def _known_writers(nodes: Collection[Node]) -> _Writers | None:
    """Who writes what in the graph of these nodes; None where nobody writes anything."""
    first = next(iter(nodes), None)
    root = None if first is None else first.graph.owning_module
    if not isinstance(root, GraphModule):
        return None
    found = _KNOWN.get(root)
    if found is None or found.graph_size != len(root.graph.nodes):
        found = _KNOWN[root] = _writers_of(root)
    return found if found.writers or found.own else None


class _Writers(NamedTuple):
    """The names of the nodes that write each storage class, and by name the class and the place of each node."""

    writers: dict[int, set[str]]
    classes: dict[str, int]
    places: dict[str, int]
    #: The classes of inputs and attributes, which are there before a call and after it.
    held: frozenset[int]
    #: The nodes that write to state of their own, buffers of a module say, for which there may be no other node.
    own: frozenset[str]
    graph_size: int


#: Regions of one program ask one after the other; a new program of the module forgets the answers of the last.
_KNOWN: WeakKeyDictionary[nn.Module, _Writers] = WeakKeyDictionary()


def _writers_of(root: GraphModule) -> _Writers:
    behaviours = Behaviours(root)
    acting, size = behaviours.acting(root.graph), len(root.graph.nodes)
    own = frozenset(node.name for node, told in acting.items() if told.state_writes)
    if not own and not any(told.writes for told in acting.values()):
        return _Writers({}, {}, {}, frozenset(), own, size)
    index = Index(root.graph)
    storages = storages_of(index, behaviours, acting)
    writers: dict[int, set[str]] = {}
    for number, classes in written_classes(index, storages, acting).items():
        for written in classes:
            writers.setdefault(storages.find(written), set()).add(index.nodes[number].name)
    classes_of = {node.name: storages.find(number) for number, node in enumerate(index.nodes)}
    places = {node.name: number for number, node in enumerate(index.nodes)}
    held = frozenset(classes_of[node.name] for node in index.nodes if node.op in ("placeholder", "get_attr"))
    return _Writers(writers, classes_of, places, held, own, size)
