"""Units: what a policy by capability moves as one, each accepted by one taker or refused by all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch.fx import Node

from partita.backends.transforms import transforms_found_once
from partita.graphs.program import Program
from partita.graphs.symbols import Dimension, Symbols
from partita.policies.capabilities import Capability, Refusal, Takers
from partita.policies.kept_apart import Apart, KeptApart
from partita.policies.places import placeable
from partita.policies.together import Together, group_nodes, order_of_units
from partita.regions.reason import Reason
from partita.solvers.levels import REFUSED
from partita.solvers.relation import NO_UNIT, Relation, relation

__all__ = ["Units", "units_of", "waiting_for_symbols"]


@dataclass(frozen=True, slots=True)
class Units:
    """The units, in which each node is; their kinds (one for each taker and for all that is kept apart)."""

    relation: Relation
    unit_of: Sequence[int]
    kinds: list[int]
    #: The taker of each kind, by place in the order of preference.
    takers: list[int]
    reasons: dict[Node, str]

    def members(self) -> dict[int, list[int]]:
        """The nodes of each unit in graph order, items of containers too."""
        members: dict[int, list[int]] = {}
        for number, unit in enumerate(self.unit_of):
            if unit >= 0:
                members.setdefault(unit, []).append(number)
        return members


def units_of(
    program: Program,
    capabilities: Sequence[Capability],
    *,
    together: Together | None,
    modes_apart: bool,
    devices_apart: bool,
    apart: Apart | None = None,
) -> Units:
    """The units of a program, asked for each operator."""
    numbers = list(placeable(program))
    unit_of, order = _units(program, numbers, together)
    takers, nodes = Takers(program, capabilities), program.index.nodes
    kept_apart = KeptApart(program, modes=modes_apart, devices=devices_apart, label=apart)
    kinds, reasons = [REFUSED] * len(unit_of), dict[Node, str]()
    known: dict[Hashable, int] = {}
    taker_of_kind: list[int] = []
    with transforms_found_once(program.graph):
        for unit, members in _grouped(numbers, unit_of, is_grouped=together is not None):
            held = [nodes[number] for number in members]
            taker = takers.taker_of(held)
            if isinstance(taker, Refusal):
                reasons.update(_reasons(held, taker))
                continue
            kind = kinds[unit] = known.setdefault((taker, kept_apart.shared_by(members)), len(known))
            if kind == len(taker_of_kind):
                taker_of_kind.append(taker)
    between = _relation(program, unit_of, order, waits=())
    return Units(between, unit_of, kinds, taker_of_kind, reasons)


def waiting_for_symbols(program: Program, units: Units) -> Units:
    """The same units where each waits for every symbol that the shapes it reads mention, as regions do at borders."""
    waits = list(_waits_for_symbols(program))
    order = order_of_units(program, units.unit_of, list(placeable(program)), waits=waits)
    return replace(units, relation=_relation(program, units.unit_of, order, waits=waits))


def _units(program: Program, numbers: Sequence[int], together: Together | None) -> tuple[list[int], list[int]]:
    """The unit of each node, items beside what makes their container, and the units in an order that can run."""
    unit_of = [NO_UNIT] * len(program.index)
    for number in numbers:
        unit_of[number] = number
    if together is not None:
        group_nodes(program, unit_of, numbers, together)
    index = program.index
    for number in program.projections:
        unit_of[number] = unit_of[index.sources[index.starts[number]]]
    return unit_of, list(numbers) if together is None else order_of_units(program, unit_of, numbers)


def _grouped(
    numbers: Sequence[int], unit_of: Sequence[int], *, is_grouped: bool
) -> Iterable[tuple[int, Sequence[int]]]:
    """Each unit with its nodes; items of containers are asked of nobody."""
    if not is_grouped:
        return ((number, (number,)) for number in numbers)
    members: dict[int, list[int]] = {}
    for number in numbers:
        members.setdefault(unit_of[number], []).append(number)
    return members.items()


def _reasons(nodes: Sequence[Node], refusal: Refusal) -> dict[Node, str]:
    """The reason of the node that is refused, and of those that stay together with it."""
    text = f"it stays together with {refusal.node.name!r}, which is {refusal.reason}"
    other = Reason(text, kind="together", by=refusal.node.name)
    return {node: refusal.reason if node is refusal.node else other for node in nodes}


def _relation(
    program: Program, unit_of: Sequence[int], order: Sequence[int], *, waits: Iterable[tuple[int, int]]
) -> Relation:
    items = frozenset(program.projections)
    effects = ((a, b) for a, b in program.effects.edges() if a not in items and b not in items)
    return relation(unit_of, order, data=program.index.edges(), effects=chain(effects, waits))


def _waits_for_symbols(program: Program) -> Iterator[tuple[int, int]]:
    """What gives a symbol, with each node that reads a value which mentions it."""
    items, symbols = frozenset(program.projections), Symbols(program.index)
    for source, target in program.index.edges():
        for place, _ in symbols.sources(source):
            if not isinstance(place, Dimension) and place != target and target not in items:
                yield place, target
