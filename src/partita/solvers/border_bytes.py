"""Fewer bytes between parts: a local search that moves units between the steps that dependencies allow them.

The cost of a value is its bytes, once for each other part that reads it; all refused units count as one part. A unit
moves only where that does not raise the total, so the result is never worse than the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from partita.solvers.few_parts import Steps
from partita.solvers.relation import REFUSED, Relation

_SWEEPS = 6
#: The most units that are visited in all, so that a graph of a million takes seconds.
_MOST_VISITS = 300_000
#: Up to this many readers of a value are searched one by one; more are counted by part.
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
    """The steps after backward and forward sweeps over the `free` units, which move each unit where it costs least.

    Ties go to the later step in a backward sweep and to the earlier one in a forward sweep, so that units make room
    for others. From the third sweep on only neighbours of moved units are visited, and of large graphs only a part.
    """
    moves = _Moves(relation, kinds, steps, sizes)
    waiting, room = free, _MOST_VISITS
    for sweep in range(_SWEEPS):
        is_backward = sweep % 2 == 0
        units = reversed(waiting[-room:]) if is_backward else iter(waiting[:room])
        touched = moves.sweep(units, to_later=is_backward)
        room -= len(waiting)
        if not touched or room <= 0:
            break
        if sweep:
            waiting = [unit for unit in free if unit in touched]
    return Steps(moves.levels, steps.kinds)


def _parts(kinds: Sequence[int], levels: Sequence[int]) -> list[int]:
    """The part of each unit; 0 for all refused ones."""
    return [0 if kind == REFUSED else level for kind, level in zip(kinds, levels, strict=True)]


@final
class _Moves:
    """The current step and part of each unit."""

    def __init__(self, relation: Relation, kinds: Sequence[int], steps: Steps, sizes: Sequence[int]) -> None:
        self.relation, self.kinds, self.sizes, self.step_kinds = relation, kinds, sizes, steps.kinds
        self.levels = list(steps.levels)
        self.parts = _parts(kinds, self.levels)
        self._counts: dict[int, dict[int, int]] = {}

    def sweep(self, units: Iterable[int], *, to_later: bool) -> set[int]:
        """Moves each unit where it costs least; returns the neighbours of those that moved."""
        touched: set[int] = set()
        levels, kinds, relation = self.levels, self.kinds, self.relation
        predecessors, successors, last = relation.predecessors, relation.successors, len(self.step_kinds) - 1
        for unit in units:
            is_refused = kinds[unit] == REFUSED
            lowest, highest = (0 if is_refused else 1), last
            for source in predecessors[unit]:
                least = levels[source]
                if least >= lowest:
                    lowest = least if is_refused or kinds[source] != REFUSED else least + 1
            for target in successors[unit]:
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
                touched.update(predecessors[unit])
                touched.update(successors[unit])
        return touched

    def _cheapest(self, unit: int, lowest: int, highest: int, *, to_later: bool) -> int:
        """The step of the unit's kind that costs least: where it is, an end of its range, or where a neighbour is."""
        parts, sizes, step_kinds = self.parts, self.sizes, self.step_kinds
        here, kind, own, sources = parts[unit], self.kinds[unit], sizes[unit], self.relation.reads[unit]
        read_in = {parts[reader] for reader in self.relation.readers[unit]}
        # A source costs nothing in the step that makes it, or in which another unit reads it.
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
