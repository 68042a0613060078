"""Later writes: which values of a region somebody writes to, inside of it or outside.

A compiler may keep an output for the backward pass where plain torch keeps something else, and what is recomputed needs
its inputs as they were.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.schemas import is_higher_order
from partita.graphs.aliasing import storages_of, written_classes
from partita.graphs.behaviour_terms import Behaviour, argument
from partita.graphs.behaviours import Behaviours
from partita.graphs.index import Index

__all__ = [
    "forget_writers",
    "later_writer",
    "later_writers",
    "names_written",
    "names_written_outside",
    "readers_before_writes",
    "saved_when_compiled",
    "writers_of",
    "writing_nodes",
]


def names_written_outside(nodes: Collection[Node]) -> frozenset[str]:
    """The names of those of these nodes, all of one graph, whose memory other nodes of the graph may write."""
    found = _known_writers(nodes)
    if found is None:
        return frozenset()
    inside = {node.name for node in nodes}
    memories = {found.classes.get(name, -1) for name in inside} & found.writers.keys()
    outside = {memory for memory in memories if not inside.issuperset(found.writers[memory].names)}
    return frozenset(name for name in inside if found.classes.get(name, -1) in outside)


def names_written(nodes: Collection[Node]) -> frozenset[str]:
    """The names of those of these nodes, all of one graph, that write, or whose memory any node may write."""
    found = _known_writers(nodes)
    if found is None:
        return frozenset()
    return frozenset(
        node.name for node in nodes if node.name in found.writing or found.classes.get(node.name, -1) in found.writers
    )


def writers_of(node: Node) -> frozenset[str]:
    """The names of the nodes that may write to the memory of this one."""
    found = _known_writers((node,))
    return frozenset() if found is None else frozenset(found.writers_of(node).names)


def later_writer(source: Node, readers: Collection[Node]) -> str | None:
    """The first node, none of `readers`, that may write to the memory of `source` after one of them has read it."""
    return later_writers((source,), readers).get(source)


def later_writers(sources: Iterable[Node], readers: Collection[Node]) -> dict[Node, str]:
    """`later_writer` for each of several sources that has one, in one pass over the readers."""
    found = _known_writers(readers)
    if found is None:
        return {}
    written = {source: writers for source in sources if (writers := found.writers_of(source)).names}
    if not written:
        return {}
    first: dict[Node, int] = {}
    for reader in readers:
        for source in reader.all_input_nodes:
            if source in written:
                first[source] = min(first.get(source, found.graph_size), found.places[reader.name])
    inside = {node.name for node in readers}
    later = {source: written[source].first_after(place, inside) for source, place in first.items()}
    return {source: name for source, name in later.items() if name is not None}


def readers_before_writes(nodes: Collection[Node]) -> list[Node]:
    """Those of these nodes that compute something from an input or attribute which is written later.

    Whoever computes them again when the program has run must not read the same memory; views compute nothing.
    """
    found = _known_writers(nodes)
    if found is None:
        return []
    return [
        node
        for node in nodes
        for memory in [found.classes[source.name] for source in node.all_input_nodes]
        if found.last_writes.get(memory, -1) > found.places[node.name] and found.classes[node.name] != memory
    ]


def saved_when_compiled(nodes: Collection[Node]) -> list[Node]:
    """Those of these nodes that compute something from an input or attribute up to its last write, which they may do.

    In a compiled graph all of them read the memory as it was at first, and the backward finds there what it is at last.
    """
    found = _known_writers(nodes)
    if found is None:
        return []
    return [node for node in nodes if any(found.reads_what_goes(node, source) for source in node.all_input_nodes)]


def writing_nodes(root: GraphModule) -> tuple[str, ...]:
    """The names of the nodes of a graph that may write, in order."""
    found = _known_writers(tuple(root.graph.nodes)[:1])
    if found is None:
        return ()
    return tuple(sorted(found.writing, key=found.places.__getitem__))


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
    return found if found.writers else None


class _MemoryWriters(NamedTuple):
    """The nodes that may write one storage class, by name and by place, in order."""

    names: tuple[str, ...] = ()
    places: tuple[int, ...] = ()

    def first_after(self, place: int, without: Container[str]) -> str | None:
        """The name of the first one behind a place."""
        behind = range(bisect_right(self.places, place), len(self.places))
        return next((self.names[at] for at in behind if self.names[at] not in without), None)


class _Writers(NamedTuple):
    """Who writes each storage class, and by name the class and the place of each node."""

    graph_size: int
    writers: dict[int, _MemoryWriters]
    classes: dict[str, int]
    places: dict[str, int]
    #: All nodes that write.
    writing: frozenset[str]
    #: The place of the last write to an input or attribute, which is there before a call and after it.
    last_writes: dict[int, int]

    #: Names of nodes, and of the running statistics that they bring up to date and nobody computes anything from.
    statistics: frozenset[tuple[str, str]] = frozenset()

    def reads_what_goes(self, node: Node, source: Node) -> bool:
        """Whether a node computes something from a source that it writes, or somebody after it."""
        memory = self.classes[source.name]
        if self.last_writes.get(memory, -1) < self.places[node.name] or (node.name, source.name) in self.statistics:
            return False
        # A view computes nothing; a module or a body may give one beside other things.
        is_view = self.classes[node.name] == memory and node.name not in self.writing
        return not is_view or node.op == "call_module" or is_higher_order(node.target)

    def writers_of(self, node: Node) -> _MemoryWriters:
        return self.writers.get(self.classes.get(node.name, -1), _NOBODY)


_NOBODY = _MemoryWriters()

#: Regions of one program ask one after the other; a new program of the module forgets the answers of the last.
_KNOWN: WeakKeyDictionary[nn.Module, _Writers] = WeakKeyDictionary()


def _writers_of(root: GraphModule) -> _Writers:
    behaviours = Behaviours(root)
    acting, size = behaviours.acting(root.graph), len(root.graph.nodes)
    if not any(told.writes or told.state_writes for told in acting.values()):
        return _Writers(size, {}, {}, {}, frozenset(), {})
    index = Index(root.graph)
    storages = storages_of(index, behaviours, acting)
    numbers: dict[int, list[int]] = {}
    for number, classes in sorted(written_classes(index, storages, acting).items()):
        for memory in dict.fromkeys(map(storages.find, classes)):
            numbers.setdefault(memory, []).append(number)
    names = [node.name for node in index.nodes]
    writers = {
        memory: _MemoryWriters(tuple(map(names.__getitem__, found)), tuple(found)) for memory, found in numbers.items()
    }
    classes_of = {name: storages.find(number) for number, name in enumerate(names)}
    held = {classes_of[node.name] for node in index.nodes if node.op in ("placeholder", "get_attr")}
    return _Writers(
        size,
        writers,
        classes_of,
        {name: number for number, name in enumerate(names)},
        frozenset(name for written in writers.values() for name in written.names),
        {memory: writers[memory].places[-1] for memory in held & writers.keys()},
        frozenset(_unread_statistics(index, classes_of, acting)),
    )


def _unread_statistics(
    index: Index, classes: Mapping[str, int], acting: Mapping[Node, Behaviour]
) -> Iterator[tuple[str, str]]:
    """Nodes and the running statistics that they bring up to date, by name, where no other node reads those.

    Who computes such a node again gives statistics that are brought up to date twice.
    """
    updates = dict.fromkeys(_updated_statistics(acting))
    memories = {classes[source] for _, source in updates}
    read = {
        classes[source.name]
        for node in index.nodes
        for source in node.all_input_nodes
        if classes[source.name] in memories and (node.name, source.name) not in updates
    }
    return (update for update in updates if classes[update[1]] not in read)


def _updated_statistics(acting: Mapping[Node, Behaviour]) -> Iterator[tuple[str, str]]:
    for node, told in acting.items():
        for slot in told.writes:
            given = argument(node, slot) if slot[1] in ("running_mean", "running_var") else None
            if isinstance(given, Node):
                yield node.name, given.name
