"""Limited parts: what limits on regions leave of the parts of a program, and why nodes are left out.

Leaving a region out, or cutting it in an order in which its nodes can run, keeps a legal partition legal: they can
always run one by one where the region ran. So each part is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from torch.fx import Node

from partita.errors import OptionError
from partita.graphs.flops import Flops
from partita.graphs.program import Program
from partita.policies.capability_units import Units
from partita.policies.places import Piece
from partita.policies.region_limits import RegionLimits
from partita.policies.worthwhile import Worthwhile, worthwhile_nodes
from partita.regions import Region
from partita.regions.reason import Reason
from partita.solvers.inner_parts import connected_parts, cut_in_order, deep_order, kept_parts

__all__ = ["Part", "limited_parts"]


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
