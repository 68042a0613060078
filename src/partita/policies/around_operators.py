"""AroundOperators: chosen operators stand alone or lead a part, and what lies between them forms the other regions.

Runs are numbered in graph order, so a node may move to another run as long as numbers never fall along an edge.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import final

from torch.fx import Node

from partita._plain_help import PlainHelp
from partita.analysis.modes import Mode
from partita.errors import CycleError, OptionError
from partita.policies.constraints import TrivialNodes, check_flags, check_modes_apart
from partita.policies.legalize import Piece, assignable, legal_partition, partition_of, settled, unassigned
from partita.policies.matching import Names, check_match
from partita.program.operator_choice import Chosen, Operator, checked_operators, choosable_name, plain_name
from partita.program.program import Program, effect_neighbours
from partita.regions import Partition


@final
@dataclass(frozen=True, slots=True)
class AroundOperators(metaclass=PlainHelp):
    """The split of serving engines: `operators` apart from what lies between, which can then be compiled or captured.

    With `alone`, each chosen operator is a region of its own; without, it leads the part up to the next one. With
    `together`, operators that follow one another share a region. Views, sizes and constants go to the side where
    less crosses, and runs of fewer than `min_size` operators that do more than that join a neighbour. Regions with
    chosen operators have the label "chosen", the others "between". A program without a chosen operator is an error,
    unless `allow_empty`: then it is one region. With `modes_apart`, regions are cut where the mode changes too; by
    default where the treatment takes one mode a region.
    """

    operators: Operator | tuple[Operator, ...]
    _: KW_ONLY
    alone: bool = True
    together: bool = False
    min_size: int = 1
    allow_empty: bool = False
    modes_apart: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", checked_operators(self.operators))
        check_flags(self, "alone", "together", "allow_empty")
        check_modes_apart(self)
        if type(self.min_size) is not int or self.min_size < 1:
            raise OptionError(f"min_size is a number of operators from 1 on, not {self.min_size!r}")

    def __call__(self, program: Program) -> Partition:
        assignment, names = self._runs(program)
        if not names:
            check_match(self, program)
        trivial = TrivialNodes(program)
        moved = move_trivial_nodes(program, assignment, chosen_runs=names, trivial=trivial)
        try:
            return partition_of(program, *self._regions(program, moved, names, trivial=trivial))
        except CycleError:  # A symbol that crosses a border adds an edge that is unknown before the cut.
            return legal_partition(program, *self._regions(program, assignment, names, trivial=trivial))

    def names(self, program: Program) -> Names:
        """The names of the operators, and of those that are called in the program."""
        assert isinstance(self.operators, tuple)
        wanted = tuple(one if isinstance(one, str) else str(getattr(one, "__name__", one)) for one in self.operators)
        return Names(wanted, tuple(_operators_in(program)), "operator", "operators called in it")

    def has_match(self, partition: Partition) -> bool:
        """Whether a region holds a chosen operator."""
        return any(region.label == "chosen" for region in partition)

    def _mode(self, program: Program, number: int, before: Mode | None) -> Mode | None:
        """The mode of a node, if modes are kept apart; a symbolic scalar takes any."""
        if not self.modes_apart or number in program.symbolic_scalars:
            return before
        return program.modes.at(number)

    def _runs(self, program: Program) -> tuple[list[int], dict[int, str]]:
        """The runs in graph order, each chosen operator one of them, and the names of those runs."""
        assert isinstance(self.operators, tuple)
        chosen = Chosen(self.operators, program.graph_module)
        assignment, names, last = unassigned(program), dict[int, str](), 0
        mode: Mode | None = None
        for number in assignable(program):
            node = program.index.nodes[number]
            before, mode = mode, self._mode(program, number, mode)
            if node in chosen:
                last += 1
                names[last] = plain_name(node)
            elif last in names or before not in (None, mode):
                last += 1
            assignment[number] = last
        return assignment, names

    def _regions(
        self, program: Program, assignment: Sequence[int], names: dict[int, str], *, trivial: TrivialNodes
    ) -> tuple[list[int], list[Piece]]:
        """The assignment by region, and the regions, once small runs and what belongs together are merged."""
        tidy = absorb_small_runs(program, assignment, chosen_runs=names, trivial=trivial, min_size=self.min_size)
        region_of: dict[int, int] = {}
        pieces: list[Piece] = []
        previous: int | None = None
        between = 0
        modes: dict[int | None, Mode] = {}
        for number, run in enumerate(tidy if self.modes_apart else ()):
            if run >= 0 and number not in program.symbolic_scalars:
                modes.setdefault(run, program.modes.at(number))
        for run in sorted({run for run in tidy if run >= 0}):
            if not self._joins(previous, run, names) or modes.get(previous) != modes.get(run):
                pieces.append(Piece(names[run], "chosen") if run in names else Piece(f"part_{between}", "between"))
                between += run not in names
            region_of[run] = len(pieces) - 1
            previous = run
        return [region_of.get(run, run) for run in tidy], pieces

    def _joins(self, previous: int | None, run: int, names: dict[int, str]) -> bool:
        """Whether `run` belongs to the region that `previous` ends."""
        if previous is None:
            return False
        if run in names:
            return self.together and previous in names
        return not self.alone


def _operators_in(program: Program) -> Iterator[str]:
    """The names under which the operators of a program can be chosen."""
    return (choosable_name(node, program.graph_module) for node in program.operators())


def move_trivial_nodes(
    program: Program, assignment: Sequence[int], *, chosen_runs: Collection[int], trivial: TrivialNodes
) -> list[int]:
    """Moves trivial nodes to their only users where nothing more must cross, and trivial runs to their producers."""
    moves = _Moves(program, assignment, chosen_runs, trivial)
    moves.sink_to_users()
    moves.lift_trivial_runs()
    return moves.assignment


@final
class _Moves:
    """The assignment as it changes."""

    def __init__(
        self, program: Program, assignment: Sequence[int], chosen_runs: Collection[int], trivial: TrivialNodes
    ) -> None:
        self.assignment, self._items = settled(program, assignment), program.projections
        self._index, self._modes, self._chosen_runs, self._trivial = program.index, program.modes, chosen_runs, trivial
        self._first = {run: number for number, run in reversed(list(enumerate(self.assignment)))}
        self._readers = self._readers_by_run()
        self._effects = program.once(effect_neighbours)

    def sink_to_users(self) -> None:
        """Moves trivial nodes down to the one run that uses them, unless more would have to cross for that.

        They leave a run that holds nothing else in any case, since such a run only separates chosen operators.
        """
        assignment, nodes, is_nontrivial = self.assignment, self._index.nodes, self._nontrivial_runs()
        for number in reversed(range(len(nodes))):
            if assignment[number] not in is_nontrivial or number in self._items:
                continue
            run = self._only_run_of_users(nodes[number])
            if run not in is_nontrivial or run <= assignment[number] or nodes[number] not in self._trivial:
                continue
            if not self._shares_mode(number, run) or any(
                assignment[after] < run for after in self._effects.after.get(number, ())
            ):
                continue
            if not is_nontrivial[assignment[number]] or self._reads_what_enters(number, run):
                self._move(number, run)

    def lift_trivial_runs(self) -> None:
        """Moves the rest of trivial runs up to the last nontrivial run, past chosen operators that allow it."""
        assignment, above = self.assignment, self._nontrivial_run_above()
        for number in range(len(self._index)):
            run = above.get(assignment[number])
            if run is None or number in self._items or not self._shares_mode(number, run):
                continue
            read = (*self._index.inputs(number), *self._effects.before.get(number, ()))
            if all(assignment[before] <= run for before in read):
                self._move(number, run)

    def _nontrivial_runs(self) -> dict[int, bool]:
        """For each run without a chosen operator whether it holds a nontrivial node."""
        nontrivial: dict[int, bool] = {}
        for run, node in zip(self.assignment, self._index.nodes, strict=True):
            if run >= 0 and run not in self._chosen_runs and not nontrivial.get(run):
                nontrivial[run] = node not in self._trivial
        return nontrivial

    def _nontrivial_run_above(self) -> dict[int, int]:
        """For each trivial run the last nontrivial run before it."""
        above: dict[int, int] = {}
        last: int | None = None
        for run, is_nontrivial in sorted(self._nontrivial_runs().items()):
            if is_nontrivial:
                last = run
            elif last is not None:
                above[run] = last
        return above

    def _shares_mode(self, number: int, run: int) -> bool:
        """Whether the move keeps a run in one mode, as some treatments need it."""
        return self._modes.at(number) == self._modes.at(self._first[run])

    def _readers_by_run(self) -> dict[tuple[int, int], int]:
        """How many nodes of each run read each node."""
        readers: dict[tuple[int, int], int] = {}
        for source, target in self._index.edges():
            key = (source, self.assignment[target])
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
            elif self.assignment[at] < 0 or self.assignment[at] != found >= 0:
                return -1
            else:
                found = self.assignment[at]
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
                self._count(read, self.assignment[at], -1)
                self._count(read, run, 1)
            self.assignment[at] = run
            moved += (user for user in node.users if self._index.number[user] in self._items)

    def _count(self, read: int, run: int, change: int) -> None:
        count = self._readers.get((read, run), 0) + change
        self._readers[read, run] = count
        if count <= 0:
            del self._readers[read, run]


def absorb_small_runs(
    program: Program, assignment: Sequence[int], *, chosen_runs: Collection[int], trivial: TrivialNodes, min_size: int
) -> list[int]:
    """Merges runs of fewer than `min_size` nontrivial operators into a neighbour.

    Such a run joins the chosen operator before it if it reads the result of that, else the one after it; where that
    runs under another mode, the other one, and where both do, none.
    """
    nodes = program.index.nodes
    inside: dict[int, list[int]] = {}
    for number, run in enumerate(assignment):
        if run >= 0:
            inside.setdefault(run, []).append(number)
    runs, into = sorted(inside), dict[int, int]()
    for at, run in enumerate(runs):
        nontrivial = (number for number in inside[run] if nodes[number] not in trivial)
        if run in chosen_runs or len(list(islice(nontrivial, min_size))) == min_size:
            continue
        before, after = runs[max(at - 1, 0)], runs[min(at + 1, len(runs) - 1)]
        reads = any(assignment[read] == before for number in inside[run] for read in program.index.inputs(number))
        for neighbour in (before, after) if reads else (after, before):
            if neighbour != run and _modes(program, inside[neighbour]) >= _modes(program, inside[run]):
                into[run] = neighbour
                break
    return [into.get(run, run) for run in assignment]


def _modes(program: Program, numbers: Iterable[int]) -> set[Mode]:
    return {program.modes.at(number) for number in numbers}
