"""Effect dependencies: which nodes must keep their order although no data flows between them.

Two nodes keep their order if both access one resource and one of them writes it. The resources are the storages of
tensors, the RNG state, the network, all other side effects, and the levels of functorch, which every call reads.
Together with the data edges of the index this is the one dependency relation that every cut and every move obeys.
Schemas of operators are trusted. An unknown function may mutate its arguments and all state of the module, use the RNG
and have any other side effect; it is ordered against every node that could observe that, and against no other. Three
things are assumed: tensors that the module owns are not passed to it as inputs as well, an unknown function reaches the
inputs of the graph only through its arguments, and it does not replace attributes of the module. Mode toggles are not
effects: see `modes`.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import final

from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Node

from partita._torch.operator_schemas import registers_hook
from partita._torch.toggles import IS_GRAD_ENABLED, TOGGLES
from partita.analysis.effects.calls import CallEffects, Storages, tensors_of
from partita.analysis.nodes import value_of
from partita.analysis.projections import projections_of


@dataclass(frozen=True, slots=True)
class GraphEffects:
    """Edge `e`: node `before[e]` stays before node `after[e]`; edges are grouped by `after`, in graph order."""

    before: array[int]
    after: array[int]
    #: Calls of unknown functions: declare these pure to lift the barrier.
    barriers: tuple[int, ...] = ()
    #: Nodes that mutate, use the RNG, communicate, or have another side effect.
    effectful: frozenset[int] = frozenset()
    #: Nodes that use a random number generator.
    rng_nodes: tuple[int, ...] = ()
    #: Placeholders and get_attr nodes whose storage may be mutated (not counting inputs that alias by chance).
    mutated_inputs: tuple[int, ...] = ()
    #: Nodes that change how every later call runs: the levels of functorch.
    fences: tuple[int, ...] = ()
    #: Tensors that modules and bodies own and may mutate when they are called.
    mutated_state: tuple[Tensor, ...] = ()

    def edges(self) -> Iterator[tuple[int, int]]:
        """Every edge as (node that stays before, node that stays after)."""
        return zip(self.before, self.after, strict=True)


def effects_of_graph(calls: CallEffects) -> GraphEffects:
    """The effects of the graph of these calls.

    Costs next to nothing where no target of the graph can have an effect, else time linear in nodes and edges.
    """
    index, effectful = calls.index, calls.effectful
    if not effectful:
        return GraphEffects(array("i"), array("i"))
    accesses = _Accesses()
    _record_chains(accesses, calls)
    _record_fences(accesses, calls)
    mutated_inputs, mutated_tensors = _record_memory(accesses, calls) if calls.mutates else ((), ())
    before, after = _edges(accesses)
    number = index.number
    return GraphEffects(
        before,
        after,
        barriers=tuple(sorted(number[node] for node, effects in effectful.items() if effects.unknown)),
        effectful=frozenset(number[node] for node in effectful),
        rng_nodes=tuple(sorted(number[node] for node, effects in effectful.items() if effects.uses_rng)),
        fences=tuple(sorted(number[node] for node, effects in effectful.items() if effects.fences)),
        mutated_inputs=mutated_inputs,
        mutated_state=_mutated_state(calls, mutated_tensors),
    )


@dataclass(frozen=True, slots=True)
class _Accesses:
    """The resources that each node reads and writes: storage classes by number; chains and the fence below zero.

    A read records the input through which it happens, or -1: if that input is the last writer, the data edge suffices.
    """

    reads: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    writes: dict[int, set[int]] = field(default_factory=dict)


_RNG, _SIDE_EFFECTS, _NETWORK, _FENCE = -1, -2, -3, -4


def _record_chains(accesses: _Accesses, calls: CallEffects) -> None:
    """RNG use, communication and other side effects each keep their order."""
    for node, effects in calls.effectful.items():
        flags = ((effects.uses_rng, _RNG), (effects.impure, _SIDE_EFFECTS), (effects.communicates, _NETWORK))
        chains = {chain for flag, chain in flags if flag}
        if chains:
            accesses.writes.setdefault(calls.index.number[node], set()).update(chains)


def _record_fences(accesses: _Accesses, calls: CallEffects) -> None:
    """Every call stays on its side of a fence; mode toggles and projections may cross it."""
    index = calls.index
    fences = {index.number[node] for node, effects in calls.effectful.items() if effects.fences}
    if not fences:
        return
    projections = frozenset(projections_of(index, calls.root))
    for i, node in enumerate(index.nodes):
        if i in fences:
            accesses.writes.setdefault(i, set()).add(_FENCE)
        elif i in projections:
            continue
        elif node.op.startswith("call_") and node.target not in TOGGLES and node.target is not IS_GRAD_ENABLED:
            accesses.reads.setdefault(i, []).append((_FENCE, -1))


def _record_memory(accesses: _Accesses, calls: CallEffects) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Mutations and the reads that observe them; returns the inputs and the tensors of modules that are mutated."""
    index, storages, mutated = calls.index, calls.storages, calls.mutated
    mutated_inputs = _mutated_inputs(calls)
    if any(index.nodes[i].op == "placeholder" for i in mutated_inputs):
        # Callers may pass one tensor twice, so a mutation of one input may be visible through all of them.
        holders = [i for i, node in enumerate(index.nodes) if node.op == "placeholder" and not _is_number(node)]
        storages = storages.joined(holders)
        mutated = {i: frozenset(map(storages.find, classes)) for i, classes in mutated.items()}
    for i, classes in mutated.items():
        accesses.writes.setdefault(i, set()).update(classes)
    hot = frozenset[int]().union(*mutated.values())
    _record_inputs(accesses, calls, storages.roots(), hot)
    _record_state(accesses, calls, storages, hot)
    _record_operands_of_waits(accesses, calls)
    return mutated_inputs, tuple(storages.tensors_in(_modified(calls, mutated)))


def _modified(calls: CallEffects, mutated: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """The classes whose memory is mutated; waiting for a collective mutates nothing."""
    nodes, effectful = calls.index.nodes, calls.effectful
    return frozenset[int]().union(*(classes for i, classes in mutated.items() if not effectful[nodes[i]].waits))


def _mutated_inputs(calls: CallEffects) -> tuple[int, ...]:
    """The inputs and attributes whose storage is mutated."""
    modified, find = _modified(calls, calls.mutated), calls.storages.find
    held = ((i, node) for i, node in enumerate(calls.index.nodes) if node.op in ("placeholder", "get_attr"))
    return tuple(i for i, _ in held if find(i) in modified)


def _is_number(node: Node) -> bool:
    return isinstance(value_of(node), int | float | complex | str | SymInt | SymFloat | SymBool)


def _record_inputs(accesses: _Accesses, calls: CallEffects, roots: list[int], hot: Collection[int]) -> None:
    """Every node reads its inputs, which matters where some node mutates them.

    Projections read no memory, and the output node comes last anyway.
    """
    index = calls.index
    is_hot = bytearray(map(hot.__contains__, roots))
    edges = compress(index.edges(), map(is_hot.__getitem__, index.sources))
    reads, exempt = accesses.reads, set(projections_of(index, calls.root))
    if index.nodes[-1].op == "output":
        exempt.add(len(index) - 1)
    for source, target in edges:
        if target not in exempt:
            reads.setdefault(target, []).append((roots[source], source))


def _record_state(accesses: _Accesses, calls: CallEffects, storages: Storages, hot: Collection[int]) -> None:
    """Calls that run modules read the tensors of those modules."""
    if not storages.is_open and not any(True for _ in storages.tensors_in(hot)):
        return
    world = storages.find(storages.world)
    for i, node in enumerate(calls.index.nodes):
        if node.op in ("call_module", "call_function"):
            for body in calls.bodies(node):
                numbers = map(storages.known_number_of, tensors_of(body))
                classes = {storages.find(number) for number in numbers if number is not None}.intersection(hot)
                classes |= {world} if storages.is_open else set()
                accesses.reads.setdefault(i, []).extend((number, -1) for number in sorted(classes))


def _record_operands_of_waits(accesses: _Accesses, calls: CallEffects) -> None:
    """Until it is waited for, a collective may still be reading its operands."""
    number_of = calls.index.number
    for node, effects in calls.effectful.items():
        if effects.waits:
            collectives = [one for first in node.all_input_nodes for one in (first, *first.all_input_nodes)]
            numbers = [number_of[collective] for collective in collectives]
            reads = [read for number in numbers for read in accesses.reads.get(number, ()) if read[0] >= 0]
            accesses.reads.setdefault(number_of[node], []).extend((number, -1) for number, _ in reads)


def _edges(accesses: _Accesses) -> tuple[array[int], array[int]]:
    """One sweep: a writer stays after the last writer and all readers since, a reader after the last writer."""
    before, after = array("i"), array("i")
    last: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    reads_of, writes_of = accesses.reads.get, accesses.writes.get
    for i in sorted(accesses.reads.keys() | accesses.writes.keys()):
        earlier: set[int] = set()
        writes = writes_of(i, ())
        for resource in writes:
            waiting = readers.pop(resource, None)
            if waiting is not None:
                earlier.update(waiting)
            elif resource in last:
                earlier.add(last[resource])
            last[resource] = i
        reads = reads_of(i, ())
        for resource, _ in reads:
            if resource not in writes:
                readers.setdefault(resource, []).append(i)
                if resource in last:
                    earlier.add(last[resource])
        earlier.difference_update([via for _, via in reads])
        earlier.discard(i)
        before.extend(sorted(earlier))
        after.extend([i] * len(earlier))
    return before, after


def _mutated_state(calls: CallEffects, mutated: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The tensors of modules that calls mutate, and those that a body returns and the graph mutates."""
    found: dict[int, Tensor] = {id(tensor): tensor for tensor in mutated}
    for node, effects in calls.effectful.items():
        owned = effects.mutated_state
        if effects.unknown:
            owned = tuple(tensor for body in calls.bodies(node) for tensor in tensors_of(body))
        found.update((id(tensor), tensor) for tensor in owned)
    return tuple(found.values())


@final
@dataclass(frozen=True, slots=True)
class HookedTensor:
    """A tensor that has a hook, or may get one from an unknown function, with all its aliases."""

    hook: Node
    #: Whether `hook` is known to register a hook.
    is_certain: bool
    #: The calls of unknown functions among its nodes.
    unknown: frozenset[Node]
    #: The nodes that return it or an alias of it.
    makers: frozenset[Node]
    #: The nodes that read it.
    readers: frozenset[Node]
    #: Whether it is an input or an output of the graph.
    is_visible: bool

    def is_divided_by(self, part: Collection[Node]) -> bool:
        """Whether some gradients of the tensor are summed inside `part`, and others outside."""
        if not self.is_certain and self.unknown.issubset(part):
            return False  # A user who puts an unknown function into a part vouches for it.
        made = self.makers.intersection(part)
        # Reads of a tensor made elsewhere go through the tensor that has the hook; views and mutations do not.
        if not any(node in self.readers or _has_user_in(node, part) for node in made):
            return False
        return self.is_visible or len(made) < len(self.makers) or not self.readers.issubset(part)


def hooked_tensors(calls: CallEffects) -> tuple[HookedTensor, ...]:
    """The tensors of a graph that have or may have hooks, in graph order."""
    index = calls.index
    unknown = {node for node, effects in calls.effectful.items() if effects.unknown}
    hooks = [node for node in index.nodes if registers_hook(node.target) or node in unknown]
    if not hooks:
        return ()
    storages = calls.storages
    members: dict[int, list[Node]] = {storages.find(index.number[hook]): [] for hook in hooks}
    for i, node in enumerate(index.nodes):
        if storages.find(i) in members:
            members[storages.find(i)].append(node)
    found = []
    for own in members.values():
        makers = frozenset(node for node in own if node.op.startswith("call_"))
        readers = frozenset(user for node in own for user in node.users)
        is_visible = len(makers) < len(own) or index.nodes[-1] in readers
        certain = next((node for node in own if registers_hook(node.target)), None)
        hook = certain or next(node for node in own if node in unknown)
        found.append(
            HookedTensor(hook, certain is not None, frozenset(unknown.intersection(own)), makers, readers, is_visible)
        )
    return tuple(found)


def _has_user_in(node: Node, part: Collection[Node]) -> bool:
    return any(user in part for user in node.users)
