"""AroundOperators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import final

from torch.fx import Node

from partita.analysis.modes import Mode
from partita.errors import CycleError, OptionError
from partita.policies.constraints import IdleNodes
from partita.policies.legalize import Piece, legal_partition, no_places, partition_of, placeable, settled
from partita.program.operator_choice import Chosen, Operator, checked_operators, plain_name
from partita.program.program import Program
from partita.regions import Partition

__all__ = ["AroundOperators"]


# AroundOperators: chosen operators stand alone or lead a part, and what lies between them forms the other regions.


@final
@dataclass(frozen=True, slots=True)
class AroundOperators:
    """The split of serving engines: `operators` apart from what lies between, which can then be compiled or captured.

    With `alone`, each chosen operator is a region of its own; without, it leads the part up to the next one. With
    `together`, operators that follow one another share a region. Views, sizes and constants go to the side where
    less crosses, and runs of fewer than `smallest` operators that do more than that join a neighbour. Regions with
    chosen operators have the label "chosen", the others "between".
    """

    operators: Operator | tuple[Operator, ...]
    _: KW_ONLY
    alone: bool = True
    together: bool = False
    smallest: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", checked_operators(self.operators))
        for name in ("alone", "together"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is True or False, not {getattr(self, name)!r}")
        if type(self.smallest) is not int or self.smallest < 1:
            raise OptionError(f"smallest is a number of operators from 1 on, not {self.smallest!r}")

    def __call__(self, program: Program) -> Partition:
        places, names = self._runs(program)
        idle = IdleNodes(program)
        moved = move_idle_nodes(program, places, chosen_runs=names, idle=idle)
        try:
            return partition_of(program, *self._regions(program, moved, names, idle=idle))
        except CycleError:  # A symbol that crosses a border adds an edge, which nobody knows before the cut.
            return legal_partition(program, *self._regions(program, places, names, idle=idle))

    def _runs(self, program: Program) -> tuple[list[int], dict[int, str]]:
        """The runs in graph order, each chosen operator one of them, and the names of those by place."""
        assert isinstance(self.operators, tuple)
        chosen = Chosen(self.operators, program.graph_module)
        places, names, last = no_places(program), dict[int, str](), 0
        for number in placeable(program):
            node = program.index.nodes[number]
            if node in chosen:
                last += 1
                names[last] = plain_name(node)
            elif last in names:
                last += 1
            places[number] = last
        return places, names

    def _regions(
        self, program: Program, places: Sequence[int], names: dict[int, str], *, idle: IdleNodes
    ) -> tuple[list[int], list[Piece]]:
        """The places by region, and the regions, once small runs and what belongs together are joined."""
        tidy = absorb_small_runs(program, places, chosen_runs=names, idle=idle, smallest=self.smallest)
        region_of: dict[int, int] = {}
        pieces: list[Piece] = []
        previous: int | None = None
        between = 0
        for run in sorted({place for place in tidy if place >= 0}):
            if not self._joins(previous, run, names):
                pieces.append(Piece(names[run], "chosen") if run in names else Piece(f"part_{between}", "between"))
                between += run not in names
            region_of[run] = len(pieces) - 1
            previous = run
        return [region_of.get(place, place) for place in tidy], pieces

    def _joins(self, previous: int | None, run: int, names: dict[int, str]) -> bool:
        """Whether `run` belongs to the region that `previous` ends."""
        if previous is None:
            return False
        if run in names:
            return self.together and previous in names
        return not self.alone


# Idle moves: views, sizes and constants between chosen operators move to the side where less crosses.
#
# Places count runs in graph order, so a move is legal as long as places never fall along an edge.


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


# Small runs: those between chosen operators that are not worth a call join a neighbour.


def absorb_small_runs(
    program: Program, places: Sequence[int], *, chosen_runs: Collection[int], idle: IdleNodes, smallest: int
) -> list[int]:
    """New places, without the runs of fewer than `smallest` operators that are not idle.

    Such a run joins the chosen operator before it if it reads what that makes, else the one after it; where that
    runs under another mode, the other one, and where both do, none.
    """
    nodes = program.index.nodes
    inside: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        if place >= 0:
            inside.setdefault(place, []).append(number)
    runs, into = sorted(inside), dict[int, int]()
    for at, run in enumerate(runs):
        busy = (number for number in inside[run] if nodes[number] not in idle)
        if run in chosen_runs or len(list(islice(busy, smallest))) == smallest:
            continue
        before, after = runs[max(at - 1, 0)], runs[min(at + 1, len(runs) - 1)]
        reads = any(places[read] == before for number in inside[run] for read in program.index.inputs(number))
        for neighbour in (before, after) if reads else (after, before):
            if neighbour != run and _modes(program, inside[neighbour]) >= _modes(program, inside[run]):
                into[run] = neighbour
                break
    return [into.get(place, place) for place in places]


def _modes(program: Program, numbers: Iterable[int]) -> set[Mode]:
    return {program.modes.at(number) for number in numbers}
