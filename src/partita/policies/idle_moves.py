"""Idle moves: views, sizes and constants between chosen operators move to the side where less crosses.

Places count runs in graph order, so a move is legal as long as places never fall along an edge.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from torch.fx import Node

from partita.graphs.program import Program
from partita.policies.idle_nodes import IdleNodes
from partita.policies.places import settled

__all__ = ["move_idle_nodes"]


def move_idle_nodes(
    program: Program, places: Sequence[int], *, chosen_runs: Collection[int], idle: IdleNodes
) -> list[int]:
    """New places: idle nodes beside their only users where nothing more must cross, idle runs with their producers."""
    moves = _Moves(program, places, chosen_runs, idle)
    moves.sink_to_users()
    moves.lift_idle_runs()
    return moves.places


@final
class _Moves:
    """The places as they change."""

    def __init__(self, program: Program, places: Sequence[int], chosen_runs: Collection[int], idle: IdleNodes) -> None:
        self.places, self._items = settled(program, places)
        self._index, self._modes, self._chosen_runs, self._idle = program.index, program.modes, chosen_runs, idle
        self._first = {place: number for number, place in reversed(list(enumerate(self.places)))}
        self._readers = self._readers_by_run()
        self._before: dict[int, list[int]] = {}
        self._after: dict[int, list[int]] = {}
        for before, after in program.effects.edges():
            self._before.setdefault(after, []).append(before)
            self._after.setdefault(before, []).append(after)

    def sink_to_users(self) -> None:
        """Moves idle nodes down to the one run that uses them, unless more would have to cross for that.

        Out of a run that holds nothing else they move in any case, since it would disturb a chosen operator.
        """
        places, nodes, is_busy = self.places, self._index.nodes, self._runs_that_work()
        for number in reversed(range(len(nodes))):
            if places[number] not in is_busy or number in self._items:
                continue
            run = self._only_run_of_users(nodes[number])
            if run not in is_busy or run <= places[number] or nodes[number] not in self._idle:
                continue
            if not self._shares_mode(number, run) or any(places[after] < run for after in self._after.get(number, ())):
                continue
            if not is_busy[places[number]] or self._reads_what_enters(number, run):
                self._move(number, run)

    def lift_idle_runs(self) -> None:
        """Moves what is left of idle runs up to the last run that works, past chosen operators that allow it."""
        places, above = self.places, self._working_run_above()
        for number in range(len(self._index)):
            run = above.get(places[number])
            if run is None or number in self._items or not self._shares_mode(number, run):
                continue
            read = (*self._index.inputs(number), *self._before.get(number, ()))
            if all(places[before] <= run for before in read):
                self._move(number, run)

    def _runs_that_work(self) -> dict[int, bool]:
        """For each run without a chosen operator whether it holds a node that is not idle."""
        works: dict[int, bool] = {}
        for place, node in zip(self.places, self._index.nodes, strict=True):
            if place >= 0 and place not in self._chosen_runs and not works.get(place):
                works[place] = node not in self._idle
        return works

    def _working_run_above(self) -> dict[int, int]:
        """For each idle run the last run before it that works."""
        above: dict[int, int] = {}
        last: int | None = None
        for run, works in sorted(self._runs_that_work().items()):
            if works:
                last = run
            elif last is not None:
                above[run] = last
        return above

    def _shares_mode(self, number: int, run: int) -> bool:
        """Whether a treatment that takes one mode a region is still served after the move."""
        return self._modes.at(number) == self._modes.at(self._first[run])

    def _readers_by_run(self) -> dict[tuple[int, int], int]:
        """How many nodes of each run read each node."""
        readers: dict[tuple[int, int], int] = {}
        for source, target in self._index.edges():
            key = (source, self.places[target])
            readers[key] = readers.get(key, 0) + 1
        return readers

    def _only_run_of_users(self, node: Node) -> int:
        """The run of all users, looking through the items that are taken out of `node`; -1 where there is none."""
        number, found, waiting = self._index.number, -1, list(node.users)
        while waiting:
            user = waiting.pop()
            at = number[user]
            if at in self._items:
                waiting += user.users
            elif self.places[at] < 0 or self.places[at] != found >= 0:
                return -1
            else:
                found = self.places[at]
        return found

    def _reads_what_enters(self, number: int, run: int) -> bool:
        return all(
            self._index.nodes[read].op in ("placeholder", "get_attr") or (read, run) in self._readers
            for read in self._index.inputs(number)
        )

    def _move(self, number: int, run: int) -> None:
        moved = [self._index.nodes[number]]
        while moved:
            node = moved.pop()
            at = self._index.number[node]
            for read in self._index.inputs(at):
                self._count(read, self.places[at], -1)
                self._count(read, run, 1)
            self.places[at] = run
            moved += (user for user in node.users if self._index.number[user] in self._items)

    def _count(self, read: int, run: int, change: int) -> None:
        count = self._readers.get((read, run), 0) + change
        self._readers[read, run] = count
        if count <= 0:
            del self._readers[read, run]
