"""Units: what a policy by capability moves as one, each accepted by one taker or refused by all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from partita.errors import CycleError, OptionError
from partita.graphs.program import Program
from partita.graphs.values import value_of
from partita.policies.asking import asked
from partita.policies.capabilities import Capability, Refusal, Takers
from partita.policies.places import placeable
from partita.regions.reason import Reason
from partita.solvers.levels import REFUSED
from partita.solvers.quotient import ALONE, NOWHERE, quotient
from partita.solvers.relation import NO_UNIT, Relation, relation

__all__ = ["Together", "Units", "units_of"]

#: Nodes that stay together: a function that gives them the same label (None: no group), or groups of node names.
Together = Callable[[Node], Hashable | None] | Iterable[Iterable[str]]


@dataclass(frozen=True, slots=True)
class Units:
    """The units, in which each node is; their kinds (one for each taker, mode and device that is kept apart)."""

    relation: Relation
    unit_of: Sequence[int]
    kinds: list[int]
    #: The taker of each kind, by place in the order of preference.
    takers: list[int]
    reasons: dict[Node, str]


def units_of(
    program: Program,
    capabilities: Sequence[Capability],
    *,
    together: Together | None,
    modes_apart: bool,
    devices_apart: bool,
) -> Units:
    """The units of a program, asked for each operator."""
    numbers = list(placeable(program))
    unit_of, order = _units(program, numbers, together)
    takers = Takers(program, capabilities)
    kinds, reasons = [REFUSED] * len(unit_of), dict[Node, str]()
    known: dict[Hashable, int] = {}
    taker_of_kind: list[int] = []
    for unit, nodes in _members(program, numbers, unit_of, grouped=together is not None):
        taker = takers.taker_of(nodes)
        if isinstance(taker, Refusal):
            reasons.update(_reasons(nodes, taker))
            continue
        mode = program.modes.at(unit) if modes_apart else None
        device = _device(program, unit) if devices_apart else None
        kind = kinds[unit] = known.setdefault((taker, mode, device), len(known))
        if kind == len(taker_of_kind):
            taker_of_kind.append(taker)
    items = frozenset(program.projections)
    effects = ((a, b) for a, b in program.effects.edges() if a not in items and b not in items)
    between = relation(unit_of, order, data=program.index.edges(), effects=effects)
    return Units(between, unit_of, kinds, taker_of_kind, reasons)


def _members(
    program: Program, numbers: Sequence[int], unit_of: Sequence[int], *, grouped: bool
) -> Iterable[tuple[int, Sequence[Node]]]:
    """Each unit with its nodes; items of containers are asked of nobody."""
    nodes = program.index.nodes
    if not grouped:
        return ((number, (nodes[number],)) for number in numbers)
    members: dict[int, list[Node]] = {}
    for number in numbers:
        members.setdefault(unit_of[number], []).append(nodes[number])
    return members.items()


def _units(program: Program, numbers: Sequence[int], together: Together | None) -> tuple[list[int], list[int]]:
    """The unit of each node, items beside what makes their container, and the units in an order that can run."""
    unit_of = [NO_UNIT] * len(program.index)
    for number in numbers:
        unit_of[number] = number
    order = list(numbers)
    if together is not None:
        order = _grouped(program, unit_of, numbers, together)
    index = program.index
    for number in program.projections:
        unit_of[number] = unit_of[index.sources[index.starts[number]]]
    return unit_of, order


def _grouped(program: Program, unit_of: list[int], numbers: Sequence[int], together: Together) -> list[int]:
    """Puts the nodes of each group into one unit; the units in an order that can run."""
    label_of = _labels(program, together)
    first: dict[Hashable, int] = {}
    for number in numbers:
        label = asked(label_of, program.index.nodes[number], node=program.index.nodes[number], role="`together`")
        if label is not None:
            unit_of[number] = first.setdefault(label, number)
    groups = {unit: place for place, unit in enumerate(first.values())}
    owner = [groups.get(unit, ALONE) if unit >= 0 else NOWHERE for unit in unit_of]
    for number in program.projections:
        owner[number] = owner[program.index.sources[program.index.starts[number]]]
    edges = (*program.index.edges(), *program.effects.edges())
    order = quotient(owner, len(groups), edges).stable_order()
    if order is None:
        names = ", ".join(repr(program.index.nodes[unit].name) for unit in groups)
        raise CycleError(
            f"the groups that begin at {names} need each other, or something that runs between their nodes; take it "
            "into the group, or make the groups smaller"
        )
    units = list(groups)
    ordered = (units[vertex] if vertex < len(units) else vertex - len(units) for vertex in order)
    return [unit for unit in ordered if unit_of[unit] == unit]


def _labels(program: Program, together: Together) -> Callable[[Node], Hashable | None]:
    if callable(together):
        return together
    groups: dict[Node, int] = {}
    for place, names in enumerate(together):
        if isinstance(names, str):
            raise OptionError(f"`together` takes groups of names, not a name: give together=[[{names!r}, ...]]")
        for name in names:
            node = program.node(name)
            if groups.setdefault(node, place) != place:
                raise OptionError(f"`together` names {name!r} in two groups; merge them")
    return groups.get


def _reasons(nodes: Sequence[Node], refusal: Refusal) -> dict[Node, str]:
    """The reason of the node that is refused, and of those that stay together with it."""
    text = f"it stays together with {refusal.node.name!r}, which is {refusal.reason}"
    other = Reason(text, kind="together", by=refusal.node.name)
    return {node: refusal.reason if node is refusal.node else other for node in nodes}


def _device(program: Program, number: int) -> str | None:
    """The device that a node computes on: that of its value, or else of the first tensor that it reads."""
    index = program.index
    for candidate in (number, *index.inputs(number)):
        value = value_of(index.nodes[candidate])
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, torch.Tensor):
                return str(item.device)
    return None
