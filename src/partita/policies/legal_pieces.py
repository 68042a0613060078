"""Legal pieces: groups of nodes that may need each other, cut into pieces that can be called one after another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple, final

from partita.graphs.program import Program
from partita.policies.places import settled
from partita.solvers.quotient import ALONE, NOWHERE

__all__ = ["Cut", "cut_into_legal_pieces", "cut_into_runs"]


class Cut(NamedTuple):
    """The new place of each node, and for each new piece the group that it is a piece of."""

    places: list[int]
    groups: list[int]


def cut_into_legal_pieces(program: Program, places: Sequence[int]) -> Cut:
    """Pieces that data and effects allow; a group that can be called whole stays whole.

    Runs the graph in thought: a group that waits for nothing outside is run whole; where every group waits for
    another, the one with the earliest node that can run is run as far as it goes. Costs O((N + E) log N).
    """
    owner, items = settled(program, places)
    effects = ((a, b) for a, b in program.effects.edges() if a not in items and b not in items)
    schedule = _Schedule(owner, chain(program.index.edges(), effects))
    while True:
        schedule.run_alone()
        group = schedule.next_group()
        if group is None:
            return Cut(schedule.piece, schedule.groups)
        schedule.run_group(group)


def cut_into_runs(program: Program, places: Sequence[int]) -> Cut:
    """A piece for each run of one group in graph order: more pieces, but legal whatever crosses."""
    result, groups, current = list(places), [], ALONE
    items = settled(program, places)[1]
    for number, group in enumerate(places):
        if group == NOWHERE or number in items or program.index.nodes[number].op == "get_attr":
            continue
        if group >= 0:
            if group != current:
                groups.append(group)
            result[number] = len(groups) - 1
        current = group
    return Cut(settled(program, result)[0], groups)


@final
class _Schedule:
    """What has run so far, and what each node and each group still waits for."""

    def __init__(self, owner: Sequence[int], edges: Iterable[tuple[int, int]]) -> None:
        count = max(owner, default=ALONE) + 1
        self.owner, self.piece, self.groups = owner, list(owner), list[int]()
        self._successors: dict[int, list[int]] = {}
        # For each node the nodes before it that have not run; for each group the edges into it from outside.
        self._waits, self._outside = [0] * len(owner), [0] * count
        # Nodes that can run, outside groups and by group.
        self._alone: list[int] = []
        self._ready: list[list[int]] = [[] for _ in range(count)]
        # Groups that can run to their end, by first node, and groups that can start, by each node that can run.
        self._whole: list[tuple[int, int]] = []
        self._startable: list[tuple[int, int]] = []
        self._first: dict[int, int] = {}
        self._count(edges)
        self._begin()

    def run_alone(self) -> None:
        """Runs every node outside the groups that can run."""
        while self._alone:
            self._done(self._alone.pop())

    def next_group(self) -> int | None:
        """The group to run next: one that can run to its end, or else the one that could start first."""
        for heap in (self._whole, self._startable):
            while heap:
                group = heappop(heap)[1]
                if self._ready[group]:
                    return group
        return None

    def run_group(self, group: int) -> None:
        """Runs what can run of `group`, as a piece."""
        ready = self._ready[group]
        while ready:
            number = ready.pop()
            self.piece[number] = len(self.groups)
            self._done(number)
        self.groups.append(group)

    def _count(self, edges: Iterable[tuple[int, int]]) -> None:
        owner = self.owner
        for before, after in edges:
            if owner[before] != NOWHERE and owner[after] != NOWHERE:
                self._successors.setdefault(before, []).append(after)
                self._waits[after] += 1
                if owner[after] >= 0 and owner[before] != owner[after]:
                    self._outside[owner[after]] += 1

    def _begin(self) -> None:
        for number, group in enumerate(self.owner):
            if group >= 0 and self._first.setdefault(group, number) == number and not self._outside[group]:
                heappush(self._whole, (number, group))
            if group != NOWHERE and not self._waits[number]:
                self._can_run(number)

    def _done(self, number: int) -> None:
        owner = self.owner
        for after in self._successors.get(number, ()):
            self._waits[after] -= 1
            group = owner[after]
            if group >= 0 and group != owner[number]:
                self._outside[group] -= 1
                if not self._outside[group]:
                    heappush(self._whole, (self._first[group], group))
            if not self._waits[after]:
                self._can_run(after)

    def _can_run(self, number: int) -> None:
        group = self.owner[number]
        if group < 0:
            self._alone.append(number)
        else:
            self._ready[group].append(number)
            heappush(self._startable, (number, group))
