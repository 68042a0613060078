"""Later writes: which values of a region somebody writes to, inside of it or outside.

A compiler may keep an output for the backward pass where plain torch keeps something else, and what is recomputed needs
its inputs as they were.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.operators.schemas import is_higher_order
from partita.analysis.index import Index
from partita.analysis.op_effects.calls import CallEffects, storages_of, written_classes
from partita.analysis.op_effects.terms import OpEffects, argument

__all__ = [
    "LaterUses",
    "forget_writers",
    "later_uses",
    "later_writer",
    "later_writers",
    "names_written",
    "names_written_outside",
    "reads_of_mutated_inputs",
    "saved_when_compiled",
    "statistics_read_outside",
    "writers_of",
    "writing_nodes",
]


class LaterUses(NamedTuple):
    """The inputs of a graph, by name, that others use after a call of it."""

    written: frozenset[str] = frozenset()
    #: Those that the call writes and others compute something from.
    read: frozenset[str] = frozenset()


_UNUSED = LaterUses()


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


def reads_of_mutated_inputs(nodes: Collection[Node]) -> list[Node]:
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


def saved_when_compiled(nodes: Collection[Node], later: LaterUses = _UNUSED) -> list[Node]:
    """Those of these nodes that compute something from an input or attribute up to its last write, which they may do.

    In a compiled graph all of them read the memory as it was at first, and the backward finds there what it is at last.
    The graph may be called by another, which uses inputs of it `later`.
    """
    found = _known_writers(nodes) if later == _UNUSED else _writers_with_later_uses(nodes, later)
    return [] if found is None else [node for node in nodes if node.name in found.saved_when_compiled]


def later_uses(call: Node, sources: Mapping[str, Collection[Node]], later: LaterUses = _UNUSED) -> LaterUses:
    """What becomes of the inputs of a graph after this call of it; `sources` are what the call gives for each input.

    The call may be in a graph that is called itself, with inputs that are used `later`.
    """
    found = _known_writers((call,)) if later == _UNUSED else _writers_with_later_uses((call,), later)
    if found is None:
        return _UNUSED
    place = found.places[call.name]
    memories = {name: {found.classes[source.name] for source in given} for name, given in sources.items()}
    written = {memory for memory, last in found.last_writes.items() if last > place}
    own = {memory for memory, writers in found.writers.items() if call.name in writers.names}
    behind = [node for node in call.graph.nodes if found.places[node.name] > place]
    read = found.read_later | {
        found.classes[source.name] for node in behind for source in node.all_input_nodes if found.computes(node, source)
    }
    return LaterUses(
        frozenset(name for name, given in memories.items() if given & written),
        frozenset(name for name, given in memories.items() if given & own & read),
    )


def statistics_read_outside(nodes: Collection[Node]) -> list[Node]:
    """Those of these nodes that bring running statistics up to date, or state of a module, which others read later.

    A compiler that computes such a node again, from statistics that are up to date, gives the others wrong ones. Left
    out are nodes whose results are written, since these cannot be kept.
    """
    found = _known_writers(nodes)
    if found is None:
        return []
    inside = {node.name for node in nodes}
    return [
        node for node in nodes if not found.writers_of(node).names and any(found.readers_behind(node, without=inside))
    ]


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


def _writers_with_later_uses(nodes: Collection[Node], later: LaterUses) -> _Writers | None:
    """Who writes what in the graph of these nodes, where its inputs are used when it has run."""
    first = next(iter(nodes), None)
    root = None if first is None else first.graph.owning_module
    if not isinstance(root, GraphModule):
        return None
    found = _writers_of(root, is_asked=True)
    written = {found.classes[name]: found.graph_size for name in later.written}
    read = frozenset(found.classes[name] for name in later.read)
    found = found._replace(last_writes={**found.last_writes, **written}, read_later=read)
    return found.with_saved(root.graph.nodes)


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

    #: By name, the classes of the running statistics that a node brings up to date and computes nothing from.
    updates: Mapping[str, frozenset[int]] = MappingProxyType({})
    #: The names of the nodes that compute something from each of these classes, in order.
    readers: Mapping[int, tuple[str, ...]] = MappingProxyType({})
    #: The classes that others compute something from when the graph has run.
    read_later: frozenset[int] = frozenset()
    saved_when_compiled: frozenset[str] = frozenset()

    def with_saved(self, nodes: Iterable[Node]) -> _Writers:
        """The same, and which of all nodes are saved; asked for region by region, it is found once."""
        names = (n.name for n in nodes if any(self.reads_what_goes(n, source) for source in n.all_input_nodes))
        return self._replace(saved_when_compiled=frozenset(names))

    def reads_what_goes(self, node: Node, source: Node) -> bool:
        """Whether a node computes something from a source that it writes, or somebody after it."""
        memory = self.classes[source.name]
        return self.last_writes.get(memory, -1) >= self.places[node.name] and self.computes(node, source)

    def computes(self, node: Node, source: Node) -> bool:
        """Whether a node computes something from a source, or brings statistics up to date that somebody reads."""
        memory = self.classes[source.name]
        is_read = bool(self.readers.get(memory)) or memory in self.read_later
        if memory in self.updates.get(node.name, ()) and not is_read:
            return False
        return not _only_views(node, memory, self.classes, writing=self.writing)

    def readers_behind(self, node: Node, *, without: Container[str]) -> Iterator[str]:
        """The names of the nodes behind one that compute something from the statistics that it brings up to date."""
        place = self.places[node.name]
        for memory in self.updates.get(node.name, ()):
            for reader in self.readers.get(memory, ()):
                if self.places[reader] > place and reader not in without:
                    yield reader

    def writers_of(self, node: Node) -> _MemoryWriters:
        return self.writers.get(self.classes.get(node.name, -1), _NOBODY)


_NOBODY = _MemoryWriters()

#: Regions of one program ask one after the other; a new program of the module forgets the answers of the last.
_KNOWN: WeakKeyDictionary[nn.Module, _Writers] = WeakKeyDictionary()


def _writers_of(root: GraphModule, *, is_asked: bool = False) -> _Writers:
    """Who writes what; where nobody writes anything, the classes are left out unless they are asked for."""
    behaviours = CallEffects(root)
    acting, size = behaviours.acting(root.graph), len(root.graph.nodes)
    if not is_asked and not any(told.writes or told.state_writes for told in acting.values()):
        return _Writers(size, {}, {}, {}, frozenset(), {})
    index = Index(root.graph)
    storages = storages_of(index, behaviours, acting)
    written = {
        number: {storages.find(memory) for memory in classes}
        for number, classes in sorted(written_classes(index, storages, acting).items())
    }
    numbers: dict[int, list[int]] = {}
    for number, classes in written.items():
        for memory in classes:
            numbers.setdefault(memory, []).append(number)
    names = [node.name for node in index.nodes]
    writers = {
        memory: _MemoryWriters(tuple(map(names.__getitem__, places)), tuple(places))
        for memory, places in numbers.items()
    }
    classes_of = {name: storages.find(number) for number, name in enumerate(names)}
    held = {classes_of[node.name] for node in index.nodes if node.op in ("placeholder", "get_attr")}
    updates = _updates(index, written, classes_of, held, acting)
    found = _Writers(
        size,
        writers,
        classes_of,
        {name: number for number, name in enumerate(names)},
        frozenset(name for written in writers.values() for name in written.names),
        {memory: writers[memory].places[-1] for memory in held & writers.keys()},
        updates,
        _readers(index, classes_of, updates, writing={names[number] for number in written}) if updates else {},
    )
    return found.with_saved(index.nodes)


def _updates(
    index: Index,
    written: Mapping[int, Collection[int]],
    classes: Mapping[str, int],
    held: Collection[int],
    acting: Mapping[Node, OpEffects],
) -> dict[str, frozenset[int]]:
    """The classes of inputs and attributes that calls of norms, and of modules, bring up to date, by their names."""
    updates: dict[str, frozenset[int]] = {}
    for number in written:
        node = index.nodes[number]
        found = set(written[number]) if node.op == "call_module" else set()
        for slot in acting[node].writes:
            given = argument(node, slot) if slot[1] in ("running_mean", "running_var") else None
            if isinstance(given, Node):
                found.add(classes[given.name])
        if not found.isdisjoint(held):
            updates[node.name] = frozenset(found.intersection(held))
    return updates


def _readers(
    index: Index, classes: Mapping[str, int], updates: Mapping[str, frozenset[int]], *, writing: Container[str]
) -> dict[int, tuple[str, ...]]:
    """The nodes that compute something from each class of statistics, but for those that bring it up to date."""
    memories = frozenset[int]().union(*updates.values())
    readers: dict[int, dict[str, None]] = {}
    for node in index.nodes:
        for source in node.all_input_nodes:
            memory = classes[source.name]
            if memory not in memories or memory in updates.get(node.name, ()):
                continue
            if not _only_views(node, memory, classes, writing=writing):
                readers.setdefault(memory, {})[node.name] = None
    return {memory: tuple(names) for memory, names in readers.items()}


def _only_views(node: Node, memory: int, classes: Mapping[str, int], *, writing: Container[str]) -> bool:
    """Whether a node computes nothing from this memory; a module or a body may give a view beside other things."""
    is_view = classes[node.name] == memory and node.name not in writing
    return is_view and node.op != "call_module" and not is_higher_order(node.target)
