"""ByCapability: the fewest regions that hold all that somebody takes, with little traffic between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import final

from partita._torch.pause_gc import gc_paused
from partita.errors import CycleError, OptionError
from partita.graphs.program import Program
from partita.graphs.values import bytes_of
from partita.policies.capabilities import Capability, checked_capabilities, name_of
from partita.policies.capability_units import Units, units_of, waiting_for_symbols
from partita.policies.kept_apart import Apart
from partita.policies.limited_parts import Part, limited_parts
from partita.policies.places import Piece, no_places, partition_of
from partita.policies.region_limits import RegionLimits
from partita.policies.together import Together, checked_together
from partita.policies.worthwhile import Worthwhile
from partita.regions import Partition
from partita.solvers.border_bytes import border_bytes, moved_for_bytes
from partita.solvers.few_parts import Steps, few_steps
from partita.solvers.grown_parts import grown_parts
from partita.solvers.inner_parts import connected_parts
from partita.solvers.levels import REFUSED, earliest_levels, latest_levels
from partita.solvers.quotient import ALONE
from partita.solvers.relation import Relation

__all__ = ["ByCapability"]


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
