"""What a recomputed region needs copies of: inputs that somebody writes once it has read them, and state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from partita.graphs.aliasing import storages_of, written_classes
from partita.graphs.behaviours import Behaviours
from partita.graphs.later_writes import later_writers
from partita.graphs.program import Program
from partita.graphs.values import value_of
from partita.regions import Region

__all__ = ["inputs_written_later", "state_written"]


def inputs_written_later(body: GraphModule, region: Region, program: Program | None) -> tuple[int, ...]:
    """The places of inputs of the body that somebody may write to when the region has read them."""
    sources = region.inputs()
    written = {*later_writers(sources, region.nodes), *_written_by_chance(region, sources, program)}
    if not written:
        return ()
    names = {node.name for node in written}
    places = {node.name: place for place, node in enumerate(body.graph.find_nodes(op="placeholder"))}
    if names - places.keys():
        # Inputs that are called otherwise than what they stand for, such as items of containers, may be any of these.
        names |= places.keys() - {node.name for node in sources}
    return tuple(place for name, place in places.items() if name in names)


def state_written(body: GraphModule, program: Program) -> Iterator[str]:
    """The names of parameters and buffers in the body that any node of the program may write."""
    written = _written_state(program)
    for name, tensor in (*body.named_parameters(), *body.named_buffers()) if written else ():
        if id(tensor) in written:
            yield name


def _written_state(program: Program) -> frozenset[int]:
    if program not in _KNOWN_STATE:
        _KNOWN_STATE[program] = frozenset(map(id, program.effects.written_state))
    return _KNOWN_STATE[program]


#: Regions of one program ask one after the other.
_KNOWN_STATE: WeakKeyDictionary[Program, frozenset[int]] = WeakKeyDictionary()


def _written_by_chance(region: Region, sources: tuple[Node, ...], program: Program | None) -> Iterator[Node]:
    """Sources that may share memory with an input that is written later, since a caller may pass one tensor twice."""
    found = None if program is None else _input_memory(program)
    if program is None or found is None:
        return
    inside, number = set(region.nodes), program.index.number
    last = next((number[writer] for writer in reversed(found.writers) if writer not in inside), -1)
    for source in sources:
        if source in found.views:
            readers = (number[node] for node in source.users if node in inside)
            if min(readers) < last:
                yield source


class _InputMemory(NamedTuple):
    """The nodes that may look into memory of the caller's, and those that write such memory, in order."""

    views: frozenset[Node]
    writers: tuple[Node, ...]


#: Regions of one program ask one after the other; None where no input is written.
_KNOWN: WeakKeyDictionary[Program, _InputMemory | None] = WeakKeyDictionary()


def _input_memory(program: Program) -> _InputMemory | None:
    if program not in _KNOWN:
        inputs = list(_inputs(program))
        written = {program.index.nodes[number] for number in program.effects.written_inputs}
        is_shared = len(inputs) > 1 and not written.isdisjoint(inputs)
        _KNOWN[program] = _memory_of(program, inputs) if is_shared else None
    return _KNOWN[program]


def _memory_of(program: Program, inputs: list[Node]) -> _InputMemory:
    index, behaviours = program.index, Behaviours(program.graph_module, program.pure)
    acting = behaviours.acting(index.graph)
    storages = storages_of(index, behaviours, acting)
    memory = {storages.find(index.number[node]) for node in inputs}
    written = written_classes(index, storages, acting)
    return _InputMemory(
        frozenset(node for number, node in enumerate(index.nodes) if storages.find(number) in memory),
        tuple(index.nodes[number] for number in sorted(written) if not memory.isdisjoint(written[number])),
    )


def _inputs(program: Program) -> Iterator[Node]:
    """The inputs that a caller gives tensors for; parameters and buffers are the program's own."""
    placeholders = program.graph.find_nodes(op="placeholder")
    if program.export is None:
        yield from (node for node in placeholders if not isinstance(value_of(node), nn.Parameter | int | float))
        return
    for node, spec in zip(placeholders, program.export.signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            yield node
