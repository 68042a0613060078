"""ByCapability: the fewest regions that hold all that somebody takes, with little traffic between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import final

from partita._torch.pause_gc import gc_paused
from partita.errors import OptionError
from partita.graphs.program import Program
from partita.graphs.values import bytes_of
from partita.policies.capabilities import Capability, checked_capabilities, name_of
from partita.policies.capability_units import Together, Units, units_of
from partita.policies.legal_partition import legal_partition
from partita.policies.places import Piece, no_places
from partita.policies.region_limits import RegionLimits, Worthwhile, connected_parts
from partita.regions import Partition
from partita.solvers.border_bytes import border_bytes, moved_for_bytes
from partita.solvers.few_parts import Steps, few_steps
from partita.solvers.grown_parts import grown_parts
from partita.solvers.levels import REFUSED, earliest_levels, latest_levels
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
    `together` names groups of nodes that stay in one region, or outside. `worthwhile` is asked about every region: it
    answers True, False, a text with the reason to leave it out, or the nodes to keep. Regions hold nodes of one mode
    unless `modes_apart` is False, and of one device if `devices_apart` is True.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "takers", checked_capabilities(self.takers))
        for name in ("connected", "modes_apart", "devices_apart"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is True or False, not {getattr(self, name)!r}")
        RegionLimits(self.smallest, self.smallest_flops, self.largest, self.worthwhile)

    @gc_paused()
    def __call__(self, program: Program) -> Partition:
        assert isinstance(self.takers, tuple)
        units = units_of(
            program,
            self.takers,
            together=self.together,
            modes_apart=self.modes_apart,
            devices_apart=self.devices_apart,
        )
        places, takers = _places(program, units, _steps(program, units))
        if self.connected:
            pieces_of_levels = connected_parts(program, places, takers)
            grown = _grown(program, units)
            places, takers = min(filter(None, (grown, pieces_of_levels)), key=lambda found: len(found[1]))
        names = [name_of(taker) for taker in self.takers]
        limits = RegionLimits(self.smallest, self.smallest_flops, self.largest, self.worthwhile)
        pieces = [Piece(f"{names[taker]}_{place}", names[taker]) for place, taker in enumerate(takers)]
        limited = limits.applied(program, places, pieces)
        return legal_partition(program, limited.places, limited.pieces, {**units.reasons, **limited.reasons})


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


def _grown(program: Program, units: Units) -> tuple[list[int], list[int]] | None:
    """Connected parts that grow along the data, in graph order, and the taker of each; None for some large graphs."""
    part_of = grown_parts(units.relation, units.kinds)
    if part_of is None:
        return None
    places, takers, numbers = no_places(program), list[int](), dict[int, int]()
    for number, unit in enumerate(units.unit_of):
        if unit >= 0 and units.kinds[unit] != REFUSED:
            place = numbers.setdefault(part_of[unit], len(takers))
            if place == len(takers):
                takers.append(units.takers[units.kinds[unit]])
            places[number] = place
    return places, takers


def _places(program: Program, units: Units, steps: Steps) -> tuple[list[int], list[int]]:
    """The places by part, numbered in the order of the calls, and the taker of each part."""
    places = no_places(program)
    used = sorted({steps.levels[unit] for unit in units.relation.order if units.kinds[unit] != REFUSED})
    number_of = {step: place for place, step in enumerate(used)}
    for number, unit in enumerate(units.unit_of):
        if unit >= 0 and units.kinds[unit] != REFUSED:
            places[number] = number_of[steps.levels[unit]]
    return places, [units.takers[steps.kinds[step]] for step in used]
