"""Few parts for nodes of several kinds, when a part holds nodes of one kind.

The fewest are NP-hard to find: chains of two kinds alone contain the shortest common supersequence. This runs the graph
in thought, and each time runs the kind from which the longest chain of parts is still to come, as far as it goes; it
does so from both ends, with two ways to break ties, and gives the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

from partita.solvers.levels import REFUSED
from partita.solvers.relation import Relation

__all__ = ["Steps", "few_steps"]


@dataclass(frozen=True, slots=True)
class Steps:
    """The step in which each unit runs, from 1 on, and the kind of each step; refused units run after their step."""

    levels: list[int]
    #: `kinds[s]` is the kind of step `s`; step 0 holds what runs before all others.
    kinds: list[int]

    def __len__(self) -> int:
        return len(self.kinds) - 1


def few_steps(relation: Relation, kinds: Sequence[int]) -> Steps:
    """Steps of one kind each, few of them, that obey the relation."""
    found = []
    for prefer in (_widest, _narrowest):
        found.append(_run(relation, kinds, prefer))
        found.append(_turned(_run(relation.reversed(), kinds, prefer), relation, kinds))
    return min(found, key=len)


#: How ready units of one kind compare with those of another: the height that they reach first, then what is preferred.
_Prefer: TypeAlias = Callable[[int, int], int]


def _widest(ready: int, remaining: int) -> int:
    return ready


def _narrowest(ready: int, remaining: int) -> int:
    return ready - remaining


def _run(relation: Relation, kinds: Sequence[int], prefer: _Prefer) -> Steps:
    schedule = _Schedule(relation, kinds, prefer)
    while (kind := schedule.next_kind()) is not None:
        schedule.run(kind)
    return Steps(schedule.levels, schedule.kinds)


def _turned(steps: Steps, relation: Relation, kinds: Sequence[int]) -> Steps:
    """Steps of the reversed relation, told from the front; what is refused ran after its step, and is before it now."""
    count = len(steps)
    levels = [count - level + (0 if kinds[unit] == REFUSED else 1) for unit, level in enumerate(steps.levels)]
    return Steps(levels, [REFUSED, *reversed(steps.kinds[1:])])


class _Schedule:
    """What has run so far, what each unit waits for, and what is ready, by kind and with the highest first."""

    def __init__(self, relation: Relation, kinds: Sequence[int], prefer: _Prefer) -> None:
        self._relation, self._kind_of, self._prefer = relation, kinds, prefer
        self._heights = _heights(relation, kinds)
        self._waits = [0] * len(relation)
        self._ready: dict[int, list[tuple[int, int]]] = {}
        self._remaining: dict[int, int] = {}
        # The ranks of kinds, best first, some of them of the past, and the kinds whose rank has changed since.
        self._ranks: list[tuple[int, int, int]] = []
        self._changed: dict[int, None] = {}
        self._free: list[int] = []
        self.levels, self.kinds = [0] * len(relation), [REFUSED]
        for unit in relation.order:
            self._waits[unit] = len(relation.behind[unit])
            self._remaining[kinds[unit]] = self._remaining.get(kinds[unit], 0) + 1
        for unit in relation.order:
            if not self._waits[unit]:
                self._release(unit)
        self._run_refused()

    def next_kind(self) -> int | None:
        """The kind to run next; None when all has run."""
        for kind in filter(self._ready.__getitem__, self._changed):
            heappush(self._ranks, self._rank(kind))
        self._changed.clear()
        while self._ranks:
            rank = heappop(self._ranks)
            if self._ready[rank[2]] and rank == self._rank(rank[2]):
                return rank[2]
        return None

    def run(self, kind: int) -> None:
        """Runs all of `kind` that can run, as one step, and then what is refused."""
        self.kinds.append(kind)
        ready = self._ready[kind]
        while ready:
            self._remaining[kind] -= 1
            self._done(heappop(ready)[1])
        self._run_refused()

    def _rank(self, kind: int) -> tuple[int, int, int]:
        ready = self._ready[kind]
        return ready[0][0], -self._prefer(len(ready), self._remaining[kind]), kind

    def _run_refused(self) -> None:
        while self._free:
            self._done(self._free.pop())

    def _done(self, unit: int) -> None:
        self.levels[unit] = len(self.kinds) - 1
        for after in self._relation.before[unit]:
            self._waits[after] -= 1
            if not self._waits[after]:
                self._release(after)

    def _release(self, unit: int) -> None:
        kind = self._kind_of[unit]
        if kind == REFUSED:
            self._free.append(unit)
        else:
            heappush(self._ready.setdefault(kind, []), (-self._heights[unit], unit))
            self._changed[kind] = None


def _heights(relation: Relation, kinds: Sequence[int]) -> list[int]:
    """How many parts the longest path from each unit on needs."""
    heights = [0] * len(relation)
    for unit in reversed(relation.order):
        kind = kinds[unit]
        height = 0 if kind == REFUSED else 1
        for after in relation.before[unit]:
            step = 0 if kind in (REFUSED, kinds[after]) else 1
            height = max(height, heights[after] + step)
        heights[unit] = height
    return heights
