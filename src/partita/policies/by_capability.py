"""ByCapability."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import final

from torch.fx import Node

from partita._torch.gc_pause import gc_paused
from partita.analysis.nodes import bytes_of
from partita.errors import CycleError, OptionError
from partita.policies.capability import Capability, Units, checked_capabilities, name_of, units_of, waiting_for_symbols
from partita.policies.constraints import Apart, RegionLimits, Together, Worthwhile, checked_together, worthwhile_nodes
from partita.policies.legalize import Piece, no_places, partition_of
from partita.program.flops import Flops
from partita.program.program import Program
from partita.regions import Partition, Region
from partita.regions.region import Reason
from partita.solvers.border_bytes import border_bytes, moved_for_bytes
from partita.solvers.few_parts import (
    Steps,
    connected_parts,
    cut_in_order,
    deep_order,
    few_steps,
    grown_parts,
    kept_parts,
)
from partita.solvers.quotient import ALONE
from partita.solvers.relation import REFUSED, Relation, earliest_levels, latest_levels

__all__ = ["ByCapability"]


# ByCapability: the fewest regions that hold all that somebody takes, with little traffic between them.


@final
@dataclass(frozen=True, slots=True)
class ByCapability:
    """All that is taken, in the fewest regions that data, effects and modes allow.

    `takers` is one capability or several in order of preference: a node goes to the first that takes it. A capability
    is a function from a node to the reason to refuse it (None to take it), torch's `OperatorSupport`, a backend or its
    name. For a single one, in one mode, no partition has fewer regions; otherwise there are few. Then nodes move so
    that fewer bytes cross between regions. All of it takes linear time.

    With `connected`, a region holds only nodes that data connects. Regions of fewer than `smallest` operators or
    `smallest_flops` floating-point operations are left out, those of more than `largest` operators are cut.
    `together` names groups of nodes that stay in one region, or outside, and count as one node that data connects; an
    item of a container stands for what makes the container. Inputs, outputs and mode switches are in no region.
    `worthwhile` is asked about every region, also about one that comes of its answers: it answers True, False, a text
    with the reason to leave it out, or the nodes to keep. Regions hold nodes of one mode unless `modes_apart` is
    False, of one device if `devices_apart` is True, and nodes of which the function `apart` says the same.
    """

    takers: Capability | tuple[Capability, ...]
    _: KW_ONLY
    connected: bool = False
    smallest: int = 1
    smallest_flops: int = 0
    largest: int | None = None
    together: Together | None = None
    worthwhile: Worthwhile | None = None
    modes_apart: bool = True
    devices_apart: bool = False
    apart: Apart | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "takers", checked_capabilities(self.takers))
        for name in ("modes_apart", "devices_apart"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is True or False, not {getattr(self, name)!r}")
        if self.apart is not None and not callable(self.apart):
            raise OptionError(f"`apart` is a function from a node to what keeps it apart, not {self.apart!r}")
        object.__setattr__(self, "together", checked_together(self.together))
        self._limits()

    @gc_paused()
    def __call__(self, program: Program) -> Partition:
        assert isinstance(self.takers, tuple)
        units = units_of(
            program,
            self.takers,
            together=self.together,
            modes_apart=self.modes_apart,
            devices_apart=self.devices_apart,
            apart=self.apart,
        )
        try:
            return self._partition(program, units)
        except CycleError:  # A symbol that crosses a border adds an edge, which nobody knows before the cut.
            return self._partition(program, waiting_for_symbols(program, units))

    def _partition(self, program: Program, units: Units) -> Partition:
        parts, reasons = limited_parts(self._limits(), program, units, self._parts(program, units))
        place_of = [ALONE] * len(program.index)
        for place, part in enumerate(parts):
            for unit in part.units:
                place_of[unit] = place
        places = no_places(program)
        for number, unit in enumerate(units.unit_of):
            if unit >= 0 and place_of[unit] >= 0:
                places[number] = place_of[unit]
        return partition_of(program, places, [part.piece for part in parts], {**units.reasons, **reasons})

    def _parts(self, program: Program, units: Units) -> list[Part]:
        """All that is taken, in parts that are named by who takes them, in the order of the calls."""
        assert isinstance(self.takers, tuple)
        found = _parts_by_step(units, _steps(program, units))
        if self.connected:
            pieces = [piece for part in found for piece in connected_parts(units.relation, part)]
            grown = _grown(units)
            found = pieces if grown is None or len(pieces) < len(grown) else grown
        names = [name_of(taker) for taker in self.takers]
        by = [names[units.takers[units.kinds[part[0]]]] for part in found]
        return [
            Part(Piece(f"{name}_{place}", name), part) for place, (name, part) in enumerate(zip(by, found, strict=True))
        ]

    def _limits(self) -> RegionLimits:
        return RegionLimits(self.connected, self.smallest, self.smallest_flops, self.largest, self.worthwhile)


def _steps(program: Program, units: Units) -> Steps:
    """The fewest steps for one kind, few for several, and then those with fewer bytes across borders."""
    relation, kinds = units.relation, units.kinds
    if len(units.takers) != 1:
        steps = few_steps(relation, kinds)
        return moved_for_bytes(relation, kinds, steps, free=relation.order, sizes=_sizes(program, relation.order))
    early = earliest_levels(relation, kinds)
    count = max((early[unit] for unit in relation.order if kinds[unit] != REFUSED), default=0)
    late = latest_levels(relation, kinds, count)
    free = [unit for unit in relation.order if early[unit] != late[unit]]
    kind_of_step = [REFUSED, *[0] * count]
    if not free:
        return Steps(early, kind_of_step)
    sizes = _sizes(program, relation.order)
    starts = [Steps(late, kind_of_step), Steps(early, kind_of_step)]
    if len(free) > _MANY_FREE:
        return moved_for_bytes(relation, kinds, starts[0], free=free, sizes=sizes)
    found = (moved_for_bytes(relation, kinds, start, free=free, sizes=sizes) for start in starts)
    return min(found, key=partial(_total_bytes, relation, kinds, sizes))


#: Up to this many nodes that can move, the earliest levels are tried as a start as well as the latest.
_MANY_FREE = 250_000


def _total_bytes(relation: Relation, kinds: Sequence[int], sizes: Sequence[int], steps: Steps) -> int:
    return border_bytes(relation, kinds, steps.levels, sizes)


def _sizes(program: Program, units: Sequence[int]) -> list[int]:
    """The bytes that each unit gives; one where nothing is known, so that values are counted."""
    sizes, nodes = [1] * len(program.index), program.index.nodes
    for unit in units:
        sizes[unit] = bytes_of(nodes[unit]) or 1
    return sizes


def _parts_by_step(units: Units, steps: Steps) -> list[list[int]]:
    """The units that are taken, by step, in the order of the steps."""
    parts: dict[int, list[int]] = {}
    for unit in units.relation.order:
        if units.kinds[unit] != REFUSED:
            parts.setdefault(steps.levels[unit], []).append(unit)
    return [parts[step] for step in sorted(parts)]


def _grown(units: Units) -> list[list[int]] | None:
    """Connected parts that grow along the data, by their first units; None for some large graphs."""
    part_of = grown_parts(units.relation, units.kinds)
    if part_of is None:
        return None
    parts: dict[int, list[int]] = {}
    for unit in units.relation.order:
        if units.kinds[unit] != REFUSED:
            parts.setdefault(part_of[unit], []).append(unit)
    return list(parts.values())


# Limited parts: what limits on regions leave of the parts of a program, and why nodes are left out.
#
# Leaving a region out, or cutting it in an order in which its nodes can run, keeps a legal partition legal: they can
# always run one by one where the region ran. So each part is looked at by itself.


@dataclass(frozen=True, slots=True)
class Part:
    """What will be a region, and its units in an order in which they can run."""

    piece: Piece
    units: Sequence[int]

    def cut(self, pieces: Iterable[Sequence[int]]) -> list[Part]:
        """A part for each of the pieces, the first of which keeps the name."""
        name = self.piece.name
        return [
            Part(replace(self.piece, name=f"{name}_{at}" if at else name), units) for at, units in enumerate(pieces)
        ]


def limited_parts(
    limits: RegionLimits, program: Program, units: Units, parts: list[Part]
) -> tuple[list[Part], dict[Node, str]]:
    """The parts cut to the largest, then asked, then counted; and why nodes are left out."""
    if limits.allow_anything():
        return parts, {}
    limiter = _Limiter(limits, program, units)
    return [kept for part in parts for kept in limiter.within_limits(part)], limiter.reasons


@final
class _Limiter:
    """Applies limits to one part after the other, and keeps the reasons."""

    def __init__(self, limits: RegionLimits, program: Program, units: Units) -> None:
        self.reasons: dict[Node, str] = {}
        self._limits, self._between, self._flops = limits, units.relation, Flops()
        self._all_nodes, self._members = program.index.nodes, units.members()
        self._items = frozenset(program.projections)

    def within_limits(self, part: Part) -> Iterator[Part]:
        for cut in self._cut_to_largest(part):
            for kept in self._worthwhile_parts(cut):
                why = self._why_too_small(kept.units)
                if not why:
                    yield kept
                    continue
                text = f"its region {kept.piece.name!r} is too small: {why}"
                self._leave_out(kept.units, Reason(text, kind="not worthwhile", why=why))

    def _cut_to_largest(self, part: Part) -> list[Part]:
        largest = self._limits.largest
        if largest is None:
            return [part]
        sizes = {unit: len(self._operators(unit)) for unit in part.units}
        unit = max(sizes, key=sizes.__getitem__)
        if sizes[unit] > largest:
            raise OptionError(
                f"`together` has a group of {sizes[unit]} operators, which begins at {self._nodes((unit,))[0].name!r}, "
                f"but `largest` is {largest}; make the group smaller, or give largest={sizes[unit]}"
            )
        if sum(sizes.values()) <= largest:
            return [part]
        if not self._limits.connected:
            return part.cut(cut_in_order(part.units, sizes, largest))
        return part.cut(self._connected(cut_in_order(deep_order(self._between, part.units), sizes, largest)))

    def _worthwhile_parts(self, part: Part) -> Iterator[Part]:
        """What is worthwhile of a part: parts for which the answer was yes, or which are just what it asked for."""
        worthwhile = self._limits.worthwhile
        waiting = [part]
        while waiting:
            part = waiting.pop()
            if worthwhile is None:
                yield part
                continue
            kept, is_as_asked = self._kept(part, worthwhile)
            if len(kept) == len(part.units):
                yield part
                continue
            pieces = self._connected(kept_parts(self._between, part.units, kept))
            if is_as_asked and len(pieces) == 1:
                yield replace(part, units=pieces[0])
            else:
                waiting += reversed(part.cut(pieces))

    def _kept(self, part: Part, worthwhile: Worthwhile) -> tuple[frozenset[int], bool]:
        """The units that stay, and whether these are just what was asked for; the others are left out."""
        nodes, name = self._nodes(part.units), part.piece.name
        chosen, why = worthwhile_nodes(worthwhile, Region(name, tuple(nodes), part.piece.label))
        reason = Reason(f"its region {name!r} is not worthwhile: {why}", kind="not worthwhile", why=why)
        kept, is_as_asked = list[int](), True
        for unit in part.units:
            operators = self._operators(unit)
            missing = next((node for node in operators if node not in chosen), None)
            if missing is None:
                kept.append(unit)
                continue
            self._leave_out((unit,), reason)
            text = f"it stays together with {missing.name!r}, which `worthwhile` leaves out"
            broken = [node for node in operators if node in chosen]
            self.reasons.update(dict.fromkeys(broken, Reason(text, kind="together", by=missing.name)))
            is_as_asked = is_as_asked and not broken
        return frozenset(kept), is_as_asked

    def _connected(self, pieces: list[list[int]]) -> list[list[int]]:
        if not self._limits.connected:
            return pieces
        return [connected for units in pieces for connected in connected_parts(self._between, units)]

    def _why_too_small(self, units: Sequence[int]) -> str:
        smallest, smallest_flops = self._limits.smallest, self._limits.smallest_flops
        operators = sum(len(self._operators(unit)) for unit in units)
        if operators < smallest:
            return f"{operators} of at least {smallest} operators"
        flops = self._flops.total(self._nodes(units)) if smallest_flops else 0
        return f"{flops} of at least {smallest_flops} FLOPs" if flops < smallest_flops else ""

    def _leave_out(self, units: Sequence[int], reason: Reason) -> None:
        self.reasons.update(dict.fromkeys(self._nodes(units), reason))

    def _nodes(self, units: Sequence[int]) -> list[Node]:
        """The nodes of some units in graph order."""
        return [self._all_nodes[number] for number in sorted(n for unit in units for n in self._members[unit])]

    def _operators(self, unit: int) -> list[Node]:
        """The nodes of a unit without items of containers, which go where their container is made."""
        return [self._all_nodes[number] for number in self._members[unit] if number not in self._items]
