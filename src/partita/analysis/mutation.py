"""Mutation: which values of a region are mutated, by which nodes, and which nodes read them before.

A compiler may save an output for backward where plain torch saves something else, and recomputation needs its inputs as
they were.
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
from partita.analysis.op_effects.calls import CallEffects, mutated_classes, storages_of
from partita.analysis.op_effects.terms import OpEffects, argument

__all__ = [
    "LaterUses",
    "forget_mutations",
    "later_mutator",
    "later_mutators",
    "later_uses",
    "mutating_nodes",
    "mutators_of",
    "names_mutated",
    "names_mutated_outside",
    "reads_of_mutated_inputs",
    "saved_when_compiled",
    "statistics_read_outside",
]


class LaterUses(NamedTuple):
    """The inputs of a graph, by name, that other nodes use after a call of it."""

    written: frozenset[str] = frozenset()
    #: Those that the call mutates and other nodes compute something from.
    read: frozenset[str] = frozenset()


_UNUSED = LaterUses()


def names_mutated_outside(nodes: Collection[Node]) -> frozenset[str]:
    """The names of those of these nodes, all of one graph, that other nodes of the graph may mutate."""
    found = _known_mutations(nodes)
    if found is None:
        return frozenset()
    inside = {node.name for node in nodes}
    memories = {found.classes.get(name, -1) for name in inside} & found.mutators.keys()
    outside = {memory for memory in memories if not inside.issuperset(found.mutators[memory].names)}
    return frozenset(name for name in inside if found.classes.get(name, -1) in outside)


def names_mutated(nodes: Collection[Node]) -> frozenset[str]:
    """The names of those of these nodes, all of one graph, that mutate, or that any node may mutate."""
    found = _known_mutations(nodes)
    if found is None:
        return frozenset()
    return frozenset(
        node.name for node in nodes if node.name in found.mutating or found.classes.get(node.name, -1) in found.mutators
    )


def mutators_of(node: Node) -> frozenset[str]:
    """The names of the nodes that may mutate the memory of this one."""
    found = _known_mutations((node,))
    return frozenset() if found is None else frozenset(found.mutators_of(node).names)


def later_mutator(source: Node, readers: Collection[Node]) -> str | None:
    """The first node, none of `readers`, that may mutate `source` after one of them has read it."""
    return later_mutators((source,), readers).get(source)


def later_mutators(sources: Iterable[Node], readers: Collection[Node]) -> dict[Node, str]:
    """`later_mutator` for each of several sources that has one, in one pass over the readers."""
    found = _known_mutations(readers)
    if found is None:
        return {}
    mutated = {source: mutators for source in sources if (mutators := found.mutators_of(source)).names}
    if not mutated:
        return {}
    first: dict[Node, int] = {}
    for reader in readers:
        for source in reader.all_input_nodes:
            if source in mutated:
                first[source] = min(first.get(source, found.graph_size), found.places[reader.name])
    inside = {node.name for node in readers}
    later = {source: mutated[source].first_after(place, inside) for source, place in first.items()}
    return {source: name for source, name in later.items() if name is not None}


def reads_of_mutated_inputs(nodes: Collection[Node]) -> list[Node]:
    """Those of these nodes that compute something from an input or attribute which is mutated later.

    Recomputing them after the program has run must not read the same memory; views compute nothing.
    """
    found = _known_mutations(nodes)
    if found is None:
        return []
    return [
        node
        for node in nodes
        for memory in [found.classes[source.name] for source in node.all_input_nodes]
        if found.last_mutations.get(memory, -1) > found.places[node.name] and found.classes[node.name] != memory
    ]


def saved_when_compiled(nodes: Collection[Node], later: LaterUses = _UNUSED) -> list[Node]:
    """Those of these nodes that compute something from an input or attribute up to its last mutation, inclusive.

    In a compiled graph all of them read the memory as it was at first, but backward finds there the final values. The
    graph may be called by another, which uses inputs of it `later`.
    """
    found = _known_mutations(nodes) if later == _UNUSED else _mutations_with_later_uses(nodes, later)
    return [] if found is None else [node for node in nodes if node.name in found.saved_when_compiled]


def later_uses(call: Node, sources: Mapping[str, Collection[Node]], later: LaterUses = _UNUSED) -> LaterUses:
    """How the inputs of a graph are used after this call of it; `sources` are the arguments for each input.

    The call may be in a graph that is called itself, with inputs that are used `later`.
    """
    found = _known_mutations((call,)) if later == _UNUSED else _mutations_with_later_uses((call,), later)
    if found is None:
        return _UNUSED
    place = found.places[call.name]
    memories = {name: {found.classes[node.name] for node in nodes} for name, nodes in sources.items()}
    mutated = {memory for memory, last in found.last_mutations.items() if last > place}
    own = {memory for memory, mutators in found.mutators.items() if call.name in mutators.names}
    behind = [node for node in call.graph.nodes if found.places[node.name] > place]
    read = found.read_later | {
        found.classes[source.name] for node in behind for source in node.all_input_nodes if found.computes(node, source)
    }
    return LaterUses(
        frozenset(name for name, classes in memories.items() if classes & mutated),
        frozenset(name for name, classes in memories.items() if classes & own & read),
    )


def statistics_read_outside(nodes: Collection[Node]) -> list[Node]:
    """Those of these nodes that update running statistics, or state of a module, which other nodes read later.

    A compiler that recomputes such a node updates the statistics twice, so the other nodes read wrong ones. Nodes whose
    results are mutated are excluded, since these cannot be saved.
    """
    found = _known_mutations(nodes)
    if found is None:
        return []
    inside = {node.name for node in nodes}
    return [
        node for node in nodes if not found.mutators_of(node).names and any(found.readers_behind(node, without=inside))
    ]


def mutating_nodes(root: GraphModule) -> tuple[str, ...]:
    """The names of the nodes of a graph that may mutate, in order."""
    found = _known_mutations(tuple(root.graph.nodes)[:1])
    if found is None:
        return ()
    return tuple(sorted(found.mutating, key=found.places.__getitem__))


def forget_mutations(root: GraphModule) -> None:
    """Drops the cached result for a graph; every new program of it does so, since the graph may have been edited."""
    _KNOWN.pop(root, None)


def _known_mutations(nodes: Collection[Node]) -> _Mutations | None:
    """The mutations in the graph of these nodes; None where there are none."""
    first = next(iter(nodes), None)
    root = None if first is None else first.graph.owning_module
    if not isinstance(root, GraphModule):
        return None
    found = _KNOWN.get(root)
    if found is None or found.graph_size != len(root.graph.nodes):
        found = _KNOWN[root] = _mutations_of(root)
    return found if found.mutators else None


def _mutations_with_later_uses(nodes: Collection[Node], later: LaterUses) -> _Mutations | None:
    """The mutations in the graph of these nodes, whose inputs are used after it has run."""
    first = next(iter(nodes), None)
    root = None if first is None else first.graph.owning_module
    if not isinstance(root, GraphModule):
        return None
    found = _mutations_of(root, needs_classes=True)
    mutated = {found.classes[name]: found.graph_size for name in later.written}
    read = frozenset(found.classes[name] for name in later.read)
    found = found._replace(last_mutations={**found.last_mutations, **mutated}, read_later=read)
    return found.with_saved(root.graph.nodes)


class _Mutators(NamedTuple):
    """The nodes that may mutate one storage class, by name and by place, in order."""

    names: tuple[str, ...] = ()
    places: tuple[int, ...] = ()

    def first_after(self, place: int, without: Container[str]) -> str | None:
        """The name of the first one after a place."""
        behind = range(bisect_right(self.places, place), len(self.places))
        return next((self.names[at] for at in behind if self.names[at] not in without), None)


class _Mutations(NamedTuple):
    """The mutating nodes of each storage class, and by name the class and the place of each node."""

    graph_size: int
    mutators: dict[int, _Mutators]
    classes: dict[str, int]
    places: dict[str, int]
    #: All nodes that mutate.
    mutating: frozenset[str]
    #: The place of the last mutation of an input or attribute, which outlives a call.
    last_mutations: dict[int, int]

    #: By name, the classes of the running statistics that a node only updates.
    updates: Mapping[str, frozenset[int]] = MappingProxyType({})
    #: The names of the nodes that compute something from each of these classes, in order.
    readers: Mapping[int, tuple[str, ...]] = MappingProxyType({})
    #: The classes that other code computes something from after the graph has run.
    read_later: frozenset[int] = frozenset()
    saved_when_compiled: frozenset[str] = frozenset()

    def with_saved(self, nodes: Iterable[Node]) -> _Mutations:
        """The same with `saved_when_compiled` of all nodes, computed once for the queries of all regions."""
        names = (n.name for n in nodes if any(self.reads_before_mutation(n, source) for source in n.all_input_nodes))
        return self._replace(saved_when_compiled=frozenset(names))

    def reads_before_mutation(self, node: Node, source: Node) -> bool:
        """Whether a node computes something from a source that it or a later node mutates."""
        memory = self.classes[source.name]
        return self.last_mutations.get(memory, -1) >= self.places[node.name] and self.computes(node, source)

    def computes(self, node: Node, source: Node) -> bool:
        """Whether a node computes something from a source, or updates statistics that are read."""
        memory = self.classes[source.name]
        is_read = bool(self.readers.get(memory)) or memory in self.read_later
        if memory in self.updates.get(node.name, ()) and not is_read:
            return False
        return not _only_views(node, memory, self.classes, mutating=self.mutating)

    def readers_behind(self, node: Node, *, without: Container[str]) -> Iterator[str]:
        """The names of the later nodes that compute something from the statistics that a node updates."""
        place = self.places[node.name]
        for memory in self.updates.get(node.name, ()):
            for reader in self.readers.get(memory, ()):
                if self.places[reader] > place and reader not in without:
                    yield reader

    def mutators_of(self, node: Node) -> _Mutators:
        return self.mutators.get(self.classes.get(node.name, -1), _NO_MUTATORS)


_NO_MUTATORS = _Mutators()

#: Queried for the regions of one program in turn; a new program of the module drops the entry.
_KNOWN: WeakKeyDictionary[nn.Module, _Mutations] = WeakKeyDictionary()


def _mutations_of(root: GraphModule, *, needs_classes: bool = False) -> _Mutations:
    """The mutations of a graph; where there are none, the storage classes are only found if `needs_classes`."""
    calls = CallEffects(root)
    effectful, size = calls.effectful(root.graph), len(root.graph.nodes)
    if not needs_classes and not any(effects.mutates or effects.mutated_state for effects in effectful.values()):
        return _Mutations(size, {}, {}, {}, frozenset(), {})
    index = Index(root.graph)
    storages = storages_of(index, calls, effectful)
    mutated = {
        number: {storages.find(memory) for memory in classes}
        for number, classes in sorted(mutated_classes(index, storages, effectful).items())
    }
    numbers: dict[int, list[int]] = {}
    for number, classes in mutated.items():
        for memory in classes:
            numbers.setdefault(memory, []).append(number)
    names = [node.name for node in index.nodes]
    mutators = {
        memory: _Mutators(tuple(map(names.__getitem__, places)), tuple(places)) for memory, places in numbers.items()
    }
    classes_of = {name: storages.find(number) for number, name in enumerate(names)}
    held = {classes_of[node.name] for node in index.nodes if node.op in ("placeholder", "get_attr")}
    updates = _updates(index, mutated, classes_of, held, effectful)
    found = _Mutations(
        size,
        mutators,
        classes_of,
        {name: number for number, name in enumerate(names)},
        frozenset(name for mutated in mutators.values() for name in mutated.names),
        {memory: mutators[memory].places[-1] for memory in held & mutators.keys()},
        updates,
        _readers(index, classes_of, updates, mutating={names[number] for number in mutated}) if updates else {},
    )
    return found.with_saved(index.nodes)


def _updates(
    index: Index,
    mutated: Mapping[int, Collection[int]],
    classes: Mapping[str, int],
    held: Collection[int],
    effectful: Mapping[Node, OpEffects],
) -> dict[str, frozenset[int]]:
    """The classes of inputs and attributes that calls of norms and modules update, by the name of the call."""
    updates: dict[str, frozenset[int]] = {}
    for number in mutated:
        node = index.nodes[number]
        found = set(mutated[number]) if node.op == "call_module" else set()
        for slot in effectful[node].mutates:
            statistics = argument(node, slot) if slot[1] in ("running_mean", "running_var") else None
            if isinstance(statistics, Node):
                found.add(classes[statistics.name])
        if not found.isdisjoint(held):
            updates[node.name] = frozenset(found.intersection(held))
    return updates


def _readers(
    index: Index, classes: Mapping[str, int], updates: Mapping[str, frozenset[int]], *, mutating: Container[str]
) -> dict[int, tuple[str, ...]]:
    """The nodes that compute something from each class of statistics, but for those that update it."""
    memories = frozenset[int]().union(*updates.values())
    readers: dict[int, dict[str, None]] = {}
    for node in index.nodes:
        for source in node.all_input_nodes:
            memory = classes[source.name]
            if memory not in memories or memory in updates.get(node.name, ()):
                continue
            if not _only_views(node, memory, classes, mutating=mutating):
                readers.setdefault(memory, {})[node.name] = None
    return {memory: tuple(names) for memory, names in readers.items()}


def _only_views(node: Node, memory: int, classes: Mapping[str, int], *, mutating: Container[str]) -> bool:
    """Whether a node computes nothing from this memory; a module or a body may return a view among other results."""
    is_view = classes[node.name] == memory and node.name not in mutating
    return is_view and node.op != "call_module" and not is_higher_order(node.target)
