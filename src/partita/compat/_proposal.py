"""A proposal: the regions that a capability gives, as torch's partitioner would number and order them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from partita.compat._container_items import possible_items
from partita.errors import CycleError
from partita.graphs.program import Program
from partita.policies.by_capability import ByCapability
from partita.policies.capability_units import Units, units_of
from partita.solvers.grown_parts import grown_parts
from partita.solvers.levels import REFUSED, earliest_levels, latest_levels
from partita.solvers.relation import Relation

__all__ = ["Proposed", "proposal"]


@dataclass(frozen=True, slots=True)
class Proposed:
    """One part: its number, its nodes in graph order, and the items of containers that were brought to it."""

    number: int
    nodes: tuple[Node, ...]
    brought: tuple[Node, ...]


def proposal(program: Program, supported: Mapping[Node, bool], *, connected: bool) -> list[Proposed]:
    """The fewest parts that hold all supported nodes, in torch's order: those at the end of the graph first."""
    try:
        parts = _parts(program, supported, possible_items(program), connected=connected)
    except CycleError:  # Something must run between a node and what takes an item out of what it gives.
        parts = _parts(program, supported, {}, connected=connected)
    _take_inputs(program, supported, parts)
    ids, nodes = _ids(program, supported), program.index.nodes
    found = []
    for part in parts:
        searched = frozenset(part.searched)
        found.append(
            Proposed(
                _number_of(program, sorted(searched, reverse=True), ids, connected=connected),
                tuple(nodes[number] for number in part.held if number in searched),
                tuple(nodes[number] for number in part.held if number not in searched),
            )
        )
    return sorted(found, key=lambda part: part.number)


@dataclass(frozen=True, slots=True)
class _Part:
    """The nodes of a part by number: those that it will hold, and those that torch's search puts there at first.

    They differ in items of containers, which torch brings to their producer in the end.
    """

    held: list[int]
    searched: list[int]


def _parts(
    program: Program, supported: Mapping[Node, bool], items: Mapping[Node, Node], *, connected: bool
) -> list[_Part]:
    """torch's own parts where those are legal, or else those of the policy; each of `items` beside its source.

    Whatever torch's search merges ends up where its latest level by data puts it, so the levels give the same parts, in
    linear time. They are legal unless an effect or a mode says otherwise. Parts that shall be connected grow as torch's
    do, along the data from the last node on.
    """
    refusal = _refusal(
        {**supported, **{item: _is_call(source) and supported[source] for item, source in items.items()}}
    )
    together = _beside_sources(items)
    units = units_of(program, (refusal,), together=together, modes_apart=True, devices_apart=False)
    if connected:
        grown = grown_parts(units.relation, units.kinds)
        if grown is not None:
            return _found(program, supported, units, grown, _parts_of_items(program, items, units, grown))
    elif len(units.takers) <= 1:
        levels = _levels_by_data(units)
        if _obeys(units, levels):
            return _found(program, supported, units, levels, _levels_of_items(program, items, units, levels))
    policy = ByCapability(refusal, connected=connected, together=together)
    nodes, held_in = program.index.nodes, policy(program).numbers()
    return [_Part(held, [number for number in held if supported[nodes[number]]]) for held in held_in if held]


def _beside_sources(items: Mapping[Node, Node]) -> Callable[[Node], Node | None] | None:
    """What keeps each of the items in one unit with its source; None where there are none."""
    calls = {item: source for item, source in items.items() if _is_call(source)}
    sources = calls | {source: source for source in calls.values()}
    return sources.get if sources else None


def _is_call(node: Node) -> bool:
    return node.op.startswith("call_")


def _found(
    program: Program,
    supported: Mapping[Node, bool],
    units: Units,
    part_of: Sequence[int],
    items: Mapping[int, int],
) -> list[_Part]:
    """The parts by the part of each unit; `items` says where the search puts items of containers by themselves."""
    nodes, parts = program.index.nodes, dict[int, _Part]()
    for number, unit in enumerate(units.unit_of):
        if unit >= 0 and units.kinds[unit] != REFUSED:
            part = parts.get(part_of[unit])
            if part is None:
                part = parts[part_of[unit]] = _Part([], [])
            part.held.append(number)
    for number, unit in enumerate(units.unit_of):
        searched_in = parts.get(items.get(number, part_of[unit])) if unit >= 0 else None
        if searched_in is not None and supported[nodes[number]]:
            searched_in.searched.append(number)
    return list(parts.values())


def _levels_of_items(program: Program, items: Iterable[Node], units: Units, levels: Sequence[int]) -> dict[int, int]:
    """The latest level of each item of a container by itself."""
    nodes, number, unit_of = program.index.nodes, program.index.number, units.unit_of
    highest, own = max(levels, default=0), dict[int, int]()
    for item in sorted((*program.projections, *(number[node] for node in items)), reverse=True):
        readers = [number[user] for user in nodes[item].users]
        reached = [own.get(reader, levels[unit_of[reader]]) for reader in readers if unit_of[reader] >= 0]
        own[item] = min(reached, default=highest)
    return own


def _parts_of_items(program: Program, items: Iterable[Node], units: Units, part_of: Sequence[int]) -> dict[int, int]:
    """The part in which the search for connected parts puts each item of a container at first: that of who reads it."""
    nodes, number, unit_of = program.index.nodes, program.index.number, units.unit_of
    own = dict[int, int]()
    for item in sorted((*program.projections, *(number[node] for node in items)), reverse=True):
        readers = [number[user] for user in nodes[item].users]
        taken = (reader for reader in readers if unit_of[reader] >= 0 and units.kinds[unit_of[reader]] != REFUSED)
        reached = (own.get(reader, part_of[unit_of[reader]]) for reader in taken)
        own[item] = next(reached, part_of[unit_of[item]])
    return own


def _levels_by_data(units: Units) -> list[int]:
    between = units.relation
    data = Relation(between.order, between.reads, between.readers, between.reads, between.readers)
    return latest_levels(data, units.kinds, max(earliest_levels(data, units.kinds), default=0))


def _obeys(units: Units, levels: Sequence[int]) -> bool:
    """Whether no level falls where one node must stay behind another, and it rises from refused to supported nodes."""
    before, kinds = units.relation.before, units.kinds
    return all(
        levels[unit] + (kinds[unit] == REFUSED != kinds[after]) <= levels[after]
        for unit in units.relation.order
        for after in before[unit]
    )


def _refusal(supported: Mapping[Node, bool]) -> Callable[[Node], str | None]:
    def not_supported(node: Node) -> str | None:
        return None if supported[node] else "not supported"

    return not_supported


def _take_inputs(program: Program, supported: Mapping[Node, bool], parts: Sequence[_Part]) -> None:
    """Adds each supported placeholder and attribute to the one part that holds all its readers; others stay outside."""
    number = program.index.number
    owner = {at: place for place, part in enumerate(parts) for at in part.held}
    taken: set[int] = set()
    for node in (*program.graph.find_nodes(op="placeholder"), *program.graph.find_nodes(op="get_attr")):
        readers = {owner.get(number[user], -1) for user in node.users}
        if supported[node] and len(readers) == 1 and -1 not in readers:
            place = readers.pop()
            parts[place].held.append(number[node])
            parts[place].searched.append(number[node])
            taken.add(place)
    for place in taken:
        parts[place].held.sort()


def _ids(program: Program, supported: Mapping[Node, bool]) -> dict[int, int]:
    """torch counts the supported nodes from the end of the graph."""
    nodes = program.index.nodes
    counted = (number for number in reversed(range(len(nodes))) if supported[nodes[number]])
    return {number: place for place, number in enumerate(counted)}


def _number_of(program: Program, numbers: Sequence[int], ids: Mapping[int, int], *, connected: bool) -> int:
    """The number that torch gives a part, which it puts together from its last node on, as `numbers` are here.

    The larger of two pieces keeps its number, and of two equal ones the one that came last.
    """
    if not connected:  # Every node joins all that is there.
        return ids[numbers[min(1, len(numbers) - 1)]]
    nodes, place = program.index.nodes, program.index.number
    piece_of: dict[int, int] = {}
    pieces: dict[int, list[int]] = {}
    for number in numbers:
        joined = piece_of[number] = ids[number]
        pieces[joined] = [number]
        users = [piece_of[place[user]] for user in nodes[number].users if place[user] in piece_of]
        for other in dict.fromkeys(users):
            gone, joined = (joined, other) if len(pieces[joined]) < len(pieces[other]) else (other, joined)
            piece_of.update(dict.fromkeys(pieces[gone], joined))
            pieces[joined] += pieces.pop(gone)
    return max(pieces, key=lambda piece: len(pieces[piece]))
