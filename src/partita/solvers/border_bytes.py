"""Fewer bytes between parts: units move inside the freedom that a number of parts leaves them.

What counts is, for every value, its bytes once for each other part that reads it; all that is refused counts as one
part. A unit moves only where that makes the total less, or keeps it, so the result is never worse than the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from partita.solvers.few_parts import Steps
from partita.solvers.relation import REFUSED, Relation

__all__ = ["border_bytes", "moved_for_bytes"]


_SWEEPS = 6
#: So many units are looked at in all, so that a graph of a million takes seconds.
_MOST_VISITS = 300_000
#: Readers of a value are looked through for each question up to this many; for more, they are counted by part.
_FEW_READERS = 8


def border_bytes(relation: Relation, kinds: Sequence[int], levels: Sequence[int], sizes: Sequence[int]) -> int:
    """The bytes of all values, each once for every other part that reads it."""
    parts, total = _parts(kinds, levels), 0
    for unit in relation.order:
        readers = relation.readers[unit]
        if readers:
            others = {parts[reader] for reader in readers}
            total += sizes[unit] * (len(others) - (parts[unit] in others))
    return total


def moved_for_bytes(
    relation: Relation, kinds: Sequence[int], steps: Steps, *, free: Sequence[int], sizes: Sequence[int]
) -> Steps:
    """The steps after sweeps over the `free` units, back and forth, in each of which a unit moves where it saves.

    Ties go to the later step on the way back and to the earlier one on the way forth, so that what is in the way makes
    room. From the third sweep on only neighbours of what has moved are looked at, and of large graphs only a part.
    """
    moves = _Moves(relation, kinds, steps, sizes)
    waiting, room = free, _MOST_VISITS
    for sweep in range(_SWEEPS):
        is_back = sweep % 2 == 0
        units = reversed(waiting[-room:]) if is_back else iter(waiting[:room])
        touched = moves.sweep(units, to_later=is_back)
        room -= len(waiting)
        if not touched or room <= 0:
            break
        if sweep:
            waiting = [unit for unit in free if unit in touched]
    return Steps(moves.levels, steps.kinds)


def _parts(kinds: Sequence[int], levels: Sequence[int]) -> list[int]:
    """The part of each unit; 0 for all that is refused."""
    return [0 if kind == REFUSED else level for kind, level in zip(kinds, levels, strict=True)]


@final
class _Moves:
    """Where each unit is now."""

    def __init__(self, relation: Relation, kinds: Sequence[int], steps: Steps, sizes: Sequence[int]) -> None:
        self.relation, self.kinds, self.sizes, self.step_kinds = relation, kinds, sizes, steps.kinds
        self.levels = list(steps.levels)
        self.parts = _parts(kinds, self.levels)
        self._counts: dict[int, dict[int, int]] = {}

    def sweep(self, units: Iterable[int], *, to_later: bool) -> set[int]:
        """Moves each unit where it saves; the neighbours of those that moved, which may save now."""
        touched: set[int] = set()
        levels, kinds, relation = self.levels, self.kinds, self.relation
        behind, before, last = relation.behind, relation.before, len(self.step_kinds) - 1
        for unit in units:
            is_refused = kinds[unit] == REFUSED
            lowest, highest = (0 if is_refused else 1), last
            for source in behind[unit]:
                least = levels[source]
                if least >= lowest:
                    lowest = least if is_refused or kinds[source] != REFUSED else least + 1
            for target in before[unit]:
                most = levels[target]
                if most <= highest:
                    highest = most - 1 if is_refused and kinds[target] != REFUSED else most
            if lowest >= highest:
                continue
            if is_refused:
                chosen = highest if to_later else lowest  # It costs nothing anywhere, so it makes room.
            else:
                chosen = self._cheapest(unit, lowest, highest, to_later=to_later)
            if chosen != levels[unit]:
                self._move(unit, chosen)
                touched.update(behind[unit])
                touched.update(before[unit])
        return touched

    def _cheapest(self, unit: int, lowest: int, highest: int, *, to_later: bool) -> int:
        """The step of the unit's kind that costs least: where it is, an end of its range, or where a neighbour is."""
        parts, sizes, step_kinds = self.parts, self.sizes, self.step_kinds
        here, kind, own, sources = parts[unit], self.kinds[unit], sizes[unit], self.relation.reads[unit]
        read_in = {parts[reader] for reader in self.relation.readers[unit]}
        # What a source costs in a step: nothing where it is made, or where somebody else reads it.
        foreign = [(parts[source], source) for source in sources]
        candidates = {lowest, highest, here, *read_in}
        candidates.update([part for part, _ in foreign])
        best, least = here, -1
        for step in (here, *candidates):
            if not lowest <= step <= highest or step_kinds[step] != kind or (step == here and least >= 0):
                continue
            cost = own * (len(read_in) - (step in read_in))
            for part, source in foreign:
                if part != step and not self._is_read_in(source, step, without=unit):
                    cost += sizes[source]
            if least < 0 or cost < least or (cost == least and (step > best) == to_later):
                best, least = step, cost
        return best

    def _is_read_in(self, source: int, step: int, *, without: int) -> bool:
        """Whether another unit than `without` reads `source` in `step`."""
        readers, parts = self.relation.readers[source], self.parts
        if len(readers) <= _FEW_READERS:
            return any(parts[reader] == step and reader != without for reader in readers)
        counts = self._counts.get(source)
        if counts is None:
            counts = self._counts[source] = {}
            for reader in readers:
                counts[parts[reader]] = counts.get(parts[reader], 0) + 1
        own = self.relation.reads[without].count(source) if parts[without] == step else 0
        return counts.get(step, 0) > own

    def _move(self, unit: int, step: int) -> None:
        was, self.levels[unit] = self.parts[unit], step
        if self.kinds[unit] == REFUSED:
            return
        self.parts[unit] = step
        for source in self.relation.reads[unit]:
            counts = self._counts.get(source)
            if counts is not None:
                counts[was] -= 1
                counts[step] = counts.get(step, 0) + 1
