"""Effects: which nodes must keep their order although no data flows between them.

Together with the data edges of the index this is the one relation that every cut and every move obeys. Operators with
a schema are believed. A function that nobody knows may write its arguments and all state of the module, draw random
numbers and act on the world; it is ordered against everything that could notice, and against nothing else. Three things
are assumed: tensors that the module owns are not passed to it as inputs as well, an unknown function does not reach the
inputs of the graph other than through its arguments, and it does not put other tensors in the place of the module's
attributes. Mode toggles are not effects: see `modes`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch.fx import GraphModule, Node

from partita._torch.toggles import IS_GRAD_ENABLED, TOGGLES
from partita.analysis.index import Index
from partita.analysis.nodes import value_of
from partita.analysis.op_effects.calls import CallEffects, OpEffects, Storages, storages_of, tensors_of, written_classes
from partita.analysis.projections import projections_of

__all__ = ["Effects", "effects_of"]


@dataclass(frozen=True, slots=True)
class Effects:
    """Edge `e`: node `before[e]` stays before node `after[e]`; edges are grouped by `after`, in graph order."""

    before: array[int]
    after: array[int]
    #: Nodes that nobody knows: declare them pure to lift the barrier.
    barriers: tuple[int, ...] = ()
    #: Nodes that write, draw, communicate, or act on the world.
    effectful: frozenset[int] = frozenset()
    #: Nodes that draw random numbers.
    draws: tuple[int, ...] = ()
    #: Placeholders and get_attr nodes whose storage may be written (not counting inputs that alias by chance).
    written_inputs: tuple[int, ...] = ()
    #: Nodes that change how every later call is carried out: the levels of functorch.
    fences: tuple[int, ...] = ()
    #: Tensors that modules and bodies own and may write when they are called.
    written_state: tuple[Tensor, ...] = ()

    def edges(self) -> Iterator[tuple[int, int]]:
        """Every edge as (node that stays before, node that stays after)."""
        return zip(self.before, self.after, strict=True)


def effects_of(
    index: Index,
    root: GraphModule,
    *,
    pure: frozenset[Callable[..., Any]] = frozenset(),
    known_modules: dict[nn.Module, OpEffects] | None = None,
) -> Effects:
    """The effects of a graph; functions in `pure` are taken at the caller's word to have none.

    `known_modules` is what calls of modules and bodies may do, as far as it is known; what is found out is added.
    Costs next to nothing where no target of the graph can have an effect, else time linear in nodes and edges.
    """
    behaviours = CallEffects(root, pure, known_modules)
    acting = behaviours.acting(index.graph)
    if not acting:
        return Effects(array("i"), array("i"))
    touches = _Touches()
    _touch_chains(touches, index, acting)
    _touch_fences(touches, index, acting, root)
    written_inputs, written_tensors = _touch_memory(touches, index, behaviours, acting)
    before, after = _edges(touches)
    number = index.number
    return Effects(
        before,
        after,
        barriers=tuple(sorted(number[node] for node, told in acting.items() if told.unknown)),
        effectful=frozenset(number[node] for node in acting),
        draws=tuple(sorted(number[node] for node, told in acting.items() if told.draws)),
        fences=tuple(sorted(number[node] for node, told in acting.items() if told.fences)),
        written_inputs=written_inputs,
        written_state=_written_state(behaviours, acting, written_tensors),
    )


@dataclass(frozen=True, slots=True)
class _Touches:
    """What each node reads and writes: storage classes by number, and the chains and the fence below zero.

    A read notes the input through which it happens, or -1: where that input is the last writer, data keeps the order.
    """

    reads: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    writes: dict[int, set[int]] = field(default_factory=dict)


_RANDOM, _WORLD, _NETWORK, _FENCE = -1, -2, -3, -4


def _touch_chains(touches: _Touches, index: Index, acting: Mapping[Node, OpEffects]) -> None:
    """Draws, communication and other acts each happen in one order."""
    for node, told in acting.items():
        flags = ((told.draws, _RANDOM), (told.impure, _WORLD), (told.communicates, _NETWORK))
        chains = {chain for flag, chain in flags if flag}
        if chains:
            touches.writes.setdefault(index.number[node], set()).update(chains)


def _touch_fences(touches: _Touches, index: Index, acting: Mapping[Node, OpEffects], root: GraphModule) -> None:
    """Every call stays on its side of a fence; mode toggles, and what only takes an item, have no side."""
    fences = {index.number[node] for node, told in acting.items() if told.fences}
    if not fences:
        return
    projections = frozenset(projections_of(index, root))
    for i, node in enumerate(index.nodes):
        if i in fences:
            touches.writes.setdefault(i, set()).add(_FENCE)
        elif i in projections:
            continue
        elif node.op.startswith("call_") and node.target not in TOGGLES and node.target is not IS_GRAD_ENABLED:
            touches.reads.setdefault(i, []).append((_FENCE, -1))


def _touch_memory(
    touches: _Touches, index: Index, behaviours: CallEffects, acting: Mapping[Node, OpEffects]
) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Writes and the reads that can notice them; returns the inputs, and the tensors of modules, that are written."""
    if not any(told.writes or told.state_writes for told in acting.values()):
        return (), ()
    storages = storages_of(index, behaviours, acting)
    written = written_classes(index, storages, acting)
    written_inputs = _written_inputs(index, storages, written, acting)
    if any(index.nodes[i].op == "placeholder" for i in written_inputs):
        _join_placeholders(index, storages)
        written = {i: set(map(storages.find, classes)) for i, classes in written.items()}
    for i, classes in written.items():
        touches.writes.setdefault(i, set()).update(classes)
    hot = set().union(*written.values())
    _touch_inputs(touches, index, storages.roots(), hot, projections_of(index, behaviours.root))
    _touch_state(touches, index, behaviours, storages, hot)
    _touch_operands_of_waits(touches, index, acting)
    return written_inputs, tuple(storages.tensors_in(_modified(index, written, acting)))


def _modified(index: Index, written: Mapping[int, set[int]], acting: Mapping[Node, OpEffects]) -> set[int]:
    """The classes whose memory changes; to wait for a collective changes nothing."""
    return set().union(*(classes for i, classes in written.items() if not acting[index.nodes[i]].waits))


def _written_inputs(
    index: Index, storages: Storages, written: Mapping[int, set[int]], acting: Mapping[Node, OpEffects]
) -> tuple[int, ...]:
    """The inputs and attributes whose storage changes."""
    modified = _modified(index, written, acting)
    return tuple(
        i
        for i, node in enumerate(index.nodes)
        if node.op in ("placeholder", "get_attr") and storages.find(i) in modified
    )


def _join_placeholders(index: Index, storages: Storages) -> None:
    """Callers may pass one tensor twice, so a write to one input may be seen through all of them."""
    holders = [i for i, node in enumerate(index.nodes) if node.op == "placeholder" and not _is_number(node)]
    for i in holders:
        storages.join(holders[0], i)


def _is_number(node: Node) -> bool:
    return isinstance(value_of(node), int | float | complex | str | SymInt | SymFloat | SymBool)


def _touch_inputs(
    touches: _Touches, index: Index, roots: list[int], hot: set[int], projections: tuple[int, ...]
) -> None:
    """Every node reads its inputs; it matters where some node writes them.

    Taking an item out of a container reads no memory, and the output node comes last anyway.
    """
    is_hot = bytearray(map(hot.__contains__, roots))
    edges = compress(index.edges(), map(is_hot.__getitem__, index.sources))
    reads, idle = touches.reads, {*projections}
    if index.nodes[-1].op == "output":
        idle.add(len(index) - 1)
    for source, target in edges:
        if target not in idle:
            reads.setdefault(target, []).append((roots[source], source))


def _touch_state(touches: _Touches, index: Index, behaviours: CallEffects, storages: Storages, hot: set[int]) -> None:
    """Calls that run modules read the tensors of those modules."""
    if not storages.is_open and not any(True for _ in storages.tensors_in(hot)):
        return
    world = storages.find(storages.world)
    for i, node in enumerate(index.nodes):
        if node.op in ("call_module", "call_function"):
            for body in behaviours.bodies(node):
                numbers = {storages.known_number_of(tensor) for tensor in tensors_of(body)} - {None}
                classes = {storages.find(number) for number in numbers if number is not None} & hot
                classes |= {world} if storages.is_open else set()
                touches.reads.setdefault(i, []).extend((number, -1) for number in sorted(classes))


def _touch_operands_of_waits(touches: _Touches, index: Index, acting: Mapping[Node, OpEffects]) -> None:
    """Until it is waited for, a collective may still be reading its operands."""
    for node, told in acting.items():
        if told.waits:
            collectives = [given for first in node.all_input_nodes for given in (first, *first.all_input_nodes)]
            numbers = [index.number[given] for given in collectives]
            reads = [read for number in numbers for read in touches.reads.get(number, ()) if read[0] >= 0]
            touches.reads.setdefault(index.number[node], []).extend((number, -1) for number, _ in reads)


def _edges(touches: _Touches) -> tuple[array[int], array[int]]:
    """One sweep: a writer stays after the last writer and all readers since, a reader after the last writer."""
    before, after = array("i"), array("i")
    last: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    reads_of, writes_of = touches.reads.get, touches.writes.get
    for i in sorted(touches.reads.keys() | touches.writes.keys()):
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


def _written_state(
    behaviours: CallEffects, acting: Mapping[Node, OpEffects], written: Iterable[Tensor]
) -> tuple[Tensor, ...]:
    """The tensors of modules that calls write, and those that a body gives and the graph writes."""
    found: dict[int, Tensor] = {id(tensor): tensor for tensor in written}
    for node, told in acting.items():
        owned = told.state_writes
        if told.unknown:
            owned = tuple(tensor for body in behaviours.bodies(node) for tensor in tensors_of(body))
        found.update((id(tensor), tensor) for tensor in owned)
    return tuple(found.values())
