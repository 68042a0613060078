"""AroundOperators: chosen operators stand alone or lead a part, and what lies between them forms the other regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import final

from partita.errors import CycleError, OptionError
from partita.graphs.chosen_operators import Chosen, Operator, checked_operators, plain_name
from partita.graphs.program import Program
from partita.policies.idle_moves import move_idle_nodes
from partita.policies.idle_nodes import IdleNodes
from partita.policies.legal_partition import legal_partition
from partita.policies.places import Piece, no_places, partition_of, placeable
from partita.policies.small_runs import absorb_small_runs
from partita.regions import Partition

__all__ = ["AroundOperators"]


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
