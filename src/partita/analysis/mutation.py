"""Mutation: which values of a region are mutated, by which nodes, and which nodes read them before.

A compiler may save an output for backward where plain torch saves something else, and recomputation needs its inputs as
they were.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch.fx import Node

from partita._torch.operator_schemas import is_higher_order
from partita.analysis.effects.calls import CallEffects
from partita.analysis.effects.terms import argument
from partita.analysis.index import Index


class LaterUses(NamedTuple):
    """The inputs of a graph, by name, that other nodes use after a call of it."""

    mutated: frozenset[str] = frozenset()
    #: Those that the call mutates and other nodes compute something from.
    read: frozenset[str] = frozenset()


def mutations_of(calls: CallEffects) -> Mutations:
    """The mutations of a graph; where there are none, the storage classes are not computed."""
    return _analysed(calls) if calls.mutates else Mutations(len(calls.index))


def mutations_before(calls: CallEffects, later: LaterUses) -> Mutations:
    """The mutations of a graph whose inputs are used after it has run."""
    if not any(later):
        return mutations_of(calls)
    found = _analysed(calls)
    mutated = {found.classes[name]: found.graph_size for name in later.mutated}
    read = frozenset(found.classes[name] for name in later.read)
    found = replace(found, last_mutations={**found.last_mutations, **mutated}, read_later=read)
    return found.with_saved(calls.index.nodes)


@dataclass(frozen=True, slots=True)
class Mutations:
    """The mutating nodes of each storage class of a graph, and by name the class and the place of each node.

    Queries about a region take time proportional to the region, not to the graph.
    """

    graph_size: int
    mutators: Mapping[int, Mutators] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    #: All nodes that mutate.
    mutating: frozenset[str] = frozenset()
    #: The place of the last mutation of an input or attribute, which outlives a call.
    last_mutations: Mapping[int, int] = field(default_factory=dict)
    #: By name, the classes of the running statistics that a node only updates.
    updates: Mapping[str, frozenset[int]] = field(default_factory=dict)
    #: The names of the nodes that compute something from each of these classes, in order.
    readers: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    #: The classes that other code computes something from after the graph has run.
    read_later: frozenset[int] = frozenset()
    #: The names of the nodes that compute something from an input or attribute up to its last mutation, inclusive. In a
    #: compiled graph all of them read the memory as it was at first, but backward finds there the final values.
    saved_when_compiled: frozenset[str] = frozenset()

    def mutating_nodes(self) -> tuple[str, ...]:
        """The names of the nodes that may mutate, in order."""
        return tuple(sorted(self.mutating, key=self.places.__getitem__))

    def names_mutated_outside(self, nodes: Collection[Node]) -> frozenset[str]:
        """The names of those of these nodes that other nodes may mutate."""
        inside = {node.name for node in nodes}
        memories = {self.classes.get(name, -1) for name in inside} & self.mutators.keys()
        outside = {memory for memory in memories if not inside.issuperset(self.mutators[memory].names)}
        return frozenset(name for name in inside if self.classes.get(name, -1) in outside)

    def names_mutated(self, nodes: Iterable[Node]) -> frozenset[str]:
        """The names of those of these nodes that mutate, or that any node may mutate."""
        return frozenset(
            node.name
            for node in nodes
            if node.name in self.mutating or self.classes.get(node.name, -1) in self.mutators
        )

    def mutators_of(self, node: Node) -> tuple[str, ...]:
        """The names of the nodes that may mutate the memory of this one, in order."""
        return self._mutators_of(node).names

    def later_mutators(self, sources: Iterable[Node], readers: Collection[Node]) -> dict[Node, str]:
        """For each source the first node, none of `readers`, that may mutate it after one of them has read it."""
        mutated = {source: mutators for source in sources if (mutators := self._mutators_of(source)).names}
        if not mutated:
            return {}
        first: dict[Node, int] = {}
        for reader in readers:
            for source in reader.all_input_nodes:
                if source in mutated:
                    first[source] = min(first.get(source, self.graph_size), self.places[reader.name])
        inside = {node.name for node in readers}
        found: dict[Node, str | None] = {}
        searches: dict[int, _Search] = {}
        for source in sorted(first, key=first.__getitem__, reverse=True):
            search = searches.setdefault(self.classes[source.name], _Search(mutated[source], inside))
            found[source] = search.first_after(first[source])
        return {source: name for source in first if (name := found[source]) is not None}

    def mutators_in(self, memory: Iterable[int]) -> Mutators:
        """The nodes that may mutate one of these storage classes, in order."""
        held = (self.mutators[one] for one in memory if one in self.mutators)
        found = dict(sorted((place, name) for one in held for name, place in zip(one.names, one.places, strict=True)))
        return Mutators(tuple(found.values()), tuple(found))

    def reads_of_mutated_inputs(self, nodes: Iterable[Node]) -> list[Node]:
        """Those of these nodes that compute something from an input or attribute which is mutated later.

        Recomputing them after the program has run must not read the same memory; views compute nothing.
        """
        if not self.last_mutations:
            return []
        return [
            node
            for node in nodes
            for memory in [self.classes[source.name] for source in node.all_input_nodes]
            if self.last_mutations.get(memory, -1) > self.places[node.name] and self.classes[node.name] != memory
        ]

    def statistics_read_outside(self, nodes: Collection[Node]) -> list[Node]:
        """Those of these nodes that update running statistics, or state of a module, which other nodes read later.

        A compiler that recomputes such a node updates the statistics twice, so the other nodes read wrong ones. Nodes
        whose results are mutated are excluded, since these cannot be saved.
        """
        if not self.updates:
            return []
        inside, last = {node.name for node in nodes}, dict[int, int]()
        own = (node for node in nodes if node.name in self.updates and not self._mutators_of(node).names)
        return [node for node in own if self._last_reader(node, last, without=inside) > self.places[node.name]]

    def later_uses(self, call: Node, sources: Mapping[str, Collection[Node]]) -> LaterUses:
        """How the inputs of a graph are used after this call of it; `sources` are the arguments for each input."""
        if not self.classes:
            return LaterUses()
        place = self.places[call.name]
        memories = {name: {self.classes[node.name] for node in nodes} for name, nodes in sources.items()}
        mutated = {memory for memory, last in self.last_mutations.items() if last > place}
        own = {memory for memory, mutators in self.mutators.items() if call.name in mutators.names}
        behind = [node for node in call.graph.nodes if self.places[node.name] > place]
        read = self.read_later | {
            self.classes[source.name]
            for node in behind
            for source in node.all_input_nodes
            if self._computes(node, source)
        }
        return LaterUses(
            frozenset(name for name, classes in memories.items() if classes & mutated),
            frozenset(name for name, classes in memories.items() if classes & own & read),
        )

    def with_saved(self, nodes: Iterable[Node]) -> Mutations:
        """The same with `saved_when_compiled` of all nodes, computed once for the queries of all regions."""
        names = (n.name for n in nodes if any(self._reads_before_mutation(n, source) for source in n.all_input_nodes))
        return replace(self, saved_when_compiled=frozenset(names))

    def _reads_before_mutation(self, node: Node, source: Node) -> bool:
        """Whether a node computes something from a source that it or a later node mutates."""
        memory = self.classes[source.name]
        return self.last_mutations.get(memory, -1) >= self.places[node.name] and self._computes(node, source)

    def _computes(self, node: Node, source: Node) -> bool:
        """Whether a node computes something from a source, or updates statistics that are read."""
        memory = self.classes[source.name]
        is_read = bool(self.readers.get(memory)) or memory in self.read_later
        if memory in self.updates.get(node.name, ()) and not is_read:
            return False
        return not _only_views(node, memory, self.classes, mutating=self.mutating)

    def _last_reader(self, node: Node, last: dict[int, int], *, without: Container[str]) -> int:
        """The place of the last node that computes something from the statistics that a node updates, or -1.

        `last` has those of the statistics that were looked up before.
        """
        for memory in self.updates[node.name]:
            if memory not in last:
                readers = (name for name in reversed(self.readers.get(memory, ())) if name not in without)
                last[memory] = next((self.places[name] for name in readers), -1)
        return max(last[memory] for memory in self.updates[node.name])

    def _mutators_of(self, node: Node) -> Mutators:
        return self.mutators.get(self.classes.get(node.name, -1), _NO_MUTATORS)


class Mutators(NamedTuple):
    """The nodes that may mutate one storage class, by name and by place, in order."""

    names: tuple[str, ...] = ()
    places: tuple[int, ...] = ()

    def last_place(self, without: Container[str]) -> int | None:
        """The place of the last one."""
        behind = zip(reversed(self.names), reversed(self.places), strict=True)
        return next((place for name, place in behind if name not in without), None)


_NO_MUTATORS = Mutators()


class _Search:
    """Looks for mutators of one storage class that are not in a region, from the last place to the first.

    What one search has passed by, the next one does not pass by again.
    """

    def __init__(self, mutators: Mutators, without: Container[str]) -> None:
        self._mutators, self._without = mutators, without
        self._begin = len(mutators.places)
        self._found: str | None = None

    def first_after(self, place: int) -> str | None:
        """The name of the first one after a place, which is none behind that of the last search."""
        names, begin = self._mutators.names, bisect_right(self._mutators.places, place)
        passed = (names[at] for at in range(begin, self._begin) if names[at] not in self._without)
        self._found, self._begin = next(passed, self._found), begin
        return self._found


def _analysed(calls: CallEffects) -> Mutations:
    index, storages, mutated = calls.index, calls.storages, calls.mutated
    numbers: dict[int, list[int]] = {}
    for number, classes in mutated.items():
        for memory in classes:
            numbers.setdefault(memory, []).append(number)
    names = [node.name for node in index.nodes]
    mutators = {
        memory: Mutators(tuple(map(names.__getitem__, places)), tuple(places)) for memory, places in numbers.items()
    }
    classes_of = {name: storages.find(number) for number, name in enumerate(names)}
    held = {classes_of[node.name] for node in index.nodes if node.op in ("placeholder", "get_attr")}
    updates = _updates(calls, classes_of, held)
    found = Mutations(
        len(index),
        mutators,
        classes_of,
        {name: number for number, name in enumerate(names)},
        frozenset(name for mutated in mutators.values() for name in mutated.names),
        {memory: mutators[memory].places[-1] for memory in held & mutators.keys()},
        updates,
        _readers(index, classes_of, updates, mutating={names[number] for number in mutated}) if updates else {},
    )
    return found.with_saved(index.nodes)


def _updates(calls: CallEffects, classes: Mapping[str, int], held: Collection[int]) -> dict[str, frozenset[int]]:
    """The classes of inputs and attributes that calls of norms and modules update, by the name of the call."""
    updates: dict[str, frozenset[int]] = {}
    for number, mutated in calls.mutated.items():
        node = calls.index.nodes[number]
        found = set(mutated) if node.op == "call_module" else set()
        for slot in calls.effectful[node].mutates:
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
    is_view = classes[node.name] == memory and node.name not in mutating and not _may_copy(node)
    return is_view and node.op != "call_module" and not is_higher_order(node.target)


def _may_copy(node: Node) -> bool:
    """Whether a call may compute something, although its result may alias its input.

    By its arguments it returns a view or a copy (`reshape`, `einsum`), or its input or new values (`dropout`).
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.partition(".")[0]
    if name in ("getitem", "__getitem__"):
        return len(node.args) > 1 and _may_gather(node.args[1])
    return name not in _VIEWS


def _may_gather(key: object) -> bool:
    """Whether a tensor is indexed by a tensor or a list, which copies; a node may be a number or a tensor."""
    if isinstance(key, Node):
        return True
    return isinstance(key, list) or (isinstance(key, tuple) and any(map(_may_gather, key)))


#: What returns views, its input, or a container of them, whatever its arguments are.
_VIEW_NAMES = """
    H T _asdict _conj _neg_view _replace _reshape_alias _unsafe_view adjoint alias as_strided as_subclass atleast_1d
    atleast_2d atleast_3d broadcast_tensors broadcast_to cast chunk concat conj data detach diagonal dict dsplit
    enumerate expand expand_as get getattr hsplit imag items iter keys lift_fresh list mH mT meshgrid moveaxis movedim
    narrow permute pos positive real reversed select set sorted slice split split_with_sizes squeeze swapaxes swapdims
    t tensor_split transpose tuple unbind unflatten unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze
    values view view_as view_as_complex view_as_real vsplit zip
"""
_VIEWS = frozenset(_VIEW_NAMES.split())
