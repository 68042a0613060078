"""Regions numbered as torch does."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch.fx import Node

from partita._torch.operators.registry import qualified_names
from partita._torch.operators.schemas import may_return_container
from partita.analysis.nodes import value_of
from partita.errors import CycleError, OptionError
from partita.policies.by_capability import ByCapability
from partita.policies.capability import Units, units_of
from partita.program.program import Program
from partita.solvers.few_parts import grown_parts
from partita.solvers.relation import REFUSED, Relation, earliest_levels, latest_levels

__all__ = ["NamedOperators", "bookends", "checked_names", "proposal"]


# Operators that a user names by text: which nodes call them, and which of those stand at the border of a partition.


def checked_names(names: Sequence[str] | None, role: str) -> Sequence[str]:
    """`names` itself, when it is a collection of names; none if it is None."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
        raise OptionError(f"{role} is a list of names of functions, like ['torch.ops.aten.view'], not {names!r}")
    return [] if names is None else names


@final
class NamedOperators:
    """The functions with these names; the name of an operator stands for all of its overloads."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        # By identity, since hashing an operator is slow; what is asked about is alive in its graph meanwhile.
        self._known: dict[int, bool] = {}

    def __contains__(self, node: Node) -> bool:
        """Whether `node` calls one of the functions."""
        if not self.names or node.op != "call_function":
            return False
        key = id(node.target)
        if key not in self._known:
            self._known[key] = not self.names.isdisjoint(qualified_names(node.target))
        return self._known[key]

    def names_call(self, node: Node) -> bool:
        """Whether `node` calls one of the functions, as a function or as a method of a tensor."""
        return node in self or (node.op == "call_method" and f"torch.ops.aten.{node.target}" in self.names)


def bookends(nodes: Collection[Node], idle: NamedOperators) -> set[Node]:
    """The idle nodes that read nothing in `nodes` but such nodes, and those that nothing else in `nodes` reads."""
    inside, in_order = frozenset(nodes), sorted(nodes)
    leading: set[Node] = set()
    for node in in_order:
        if node in idle and all(_is_passed_over(read, inside, leading) for read in node.all_input_nodes):
            leading.add(node)
    trailing: set[Node] = set()
    for node in reversed(in_order):
        if node in idle and all(_is_passed_over(user, inside, trailing) for user in node.users):
            trailing.add(node)
    return leading | trailing


def _is_passed_over(node: Node, inside: frozenset[Node], idle: set[Node]) -> bool:
    return node not in inside or node in idle or node.op == "placeholder"


# A proposal: the regions that a capability gives, as torch's partitioner would number and order them.


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
    elif len(units.accepted_by) <= 1:
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
    before, kinds = units.relation.successors, units.kinds
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


# Items of what may be a container: torch's partitioner keeps a getitem beside its source if nothing else reads that.
#
# `torch.max(x, 0)` gives a tuple and `torch.max(x)` a tensor. In a graph without traced values nobody knows which it
# is, and a tuple that crosses a border whole is more than a compiler takes.


def possible_items(program: Program) -> dict[Node, Node]:
    """Each getitem that the program does not know to take out an item, with the node whose container it may be from."""
    known = frozenset(program.index.nodes[number] for number in program.projections)
    found: dict[Node, Node] = {}
    for node in program.graph.find_nodes(op="call_function", target=operator.getitem):
        source = node.args[0]
        if node in known or not isinstance(source, Node) or not all(map(_takes_item, source.users)):
            continue
        if source in found:
            found[node] = found[source]
        elif _may_be_container(source):
            found[node] = source
    return found


def _may_be_container(node: Node) -> bool:
    if node.op in ("call_module", "placeholder"):
        return value_of(node) is None
    is_call = node.op in ("call_function", "call_method") and node.target is not operator.getitem
    return is_call and value_of(node) is None and may_return_container(node.target)


def _takes_item(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int)
