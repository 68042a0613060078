"""From an assignment of nodes to groups to a legal partition.

An assignment maps each node, by number, to the number of a group, or to `ALONE` or `NOWHERE` as in the quotient graph.
Where these never fall along an edge, groups can be called in that order, so runs of the graph are always legal.
Groups that need each other are cut into pieces that can be called one after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, TypeVar, final

from torch.fx import Node

from partita._torch.fx.graph_writer import FreeNames, identifier
from partita.errors import CallbackError, CycleError
from partita.program.program import Program
from partita.regions import Partition, Region
from partita.regions.borders import settle_projections
from partita.regions.region import ONLY_SWITCHES
from partita.solvers.quotient import ALONE, NOWHERE

#: Stands for a reason that is an empty string.
NO_REASON = "no reason given"

_NO_OPERATORS = frozenset(("placeholder", "get_attr", "output"))
Argument = TypeVar("Argument")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Piece:
    """What will be a region: the preferred name, and the policy's label."""

    name: str
    label: Hashable = None


def legal_partition(
    program: Program,
    assignment: Sequence[int],
    pieces: Sequence[Piece],
    reasons: Mapping[Node, str] = MappingProxyType({}),
    *,
    only_largest: bool = False,
) -> Partition:
    """The groups as regions; a group that one call cannot run becomes several regions, or the largest of these."""

    def repaired(cut: Cut) -> Partition:
        kept, outside = cut.assignment, reasons
        if only_largest:
            kept, outside = _largest_pieces(program, cut, pieces, reasons)
        return partition_of(program, kept, [pieces[group] for group in cut.groups], outside)

    try:
        return partition_of(program, assignment, pieces, reasons)
    except CycleError:
        pass
    try:
        return repaired(cut_into_legal_pieces(program, assignment))
    except CycleError:  # A symbol that crosses a border adds an edge that is unknown before the cut.
        return repaired(cut_into_runs(program, assignment))


def partition_of(
    program: Program, assignment: Sequence[int], pieces: Sequence[Piece], reasons: Mapping[Node, str] | None = None
) -> Partition:
    """The partition with a region for each piece that holds a node, and a reason for each operator outside."""
    nodes = program.index.nodes
    held: list[list[Node]] = [[] for _ in pieces]
    outside = dict(reasons or {})
    for number, part in enumerate(settled(program, assignment)):
        if part >= 0:
            held[part].append(nodes[number])
            outside.pop(nodes[number], None)
        elif nodes[number].op not in _NO_OPERATORS and nodes[number] not in outside:
            outside[nodes[number]] = _reason(program, number)
    used = [(piece, tuple(inside)) for piece, inside in zip(pieces, held, strict=True) if inside]
    names = distinct_names(piece.name for piece, _ in used)
    regions = [Region(name, inside, piece.label) for name, (piece, inside) in zip(names, used, strict=True)]
    return Partition(program, regions, outside)


def unassigned(program: Program) -> list[int]:
    """An assignment in which every node is excluded."""
    assignment = [NOWHERE if node.op in ("placeholder", "output") else ALONE for node in program.index.nodes]
    for number in program.modes.toggles:
        assignment[number] = NOWHERE
    return assignment


def assignable(program: Program) -> Iterator[int]:
    """The nodes that a policy can assign, by number, in graph order.

    Mode toggles belong to no part, items of containers follow the container, and the guards of an exported program
    stay in the program, whose inputs they check.
    """
    toggles, is_first = program.modes.toggles, True
    for number, node in enumerate(program.index.nodes):
        if node.op in _NO_OPERATORS or number in toggles or number in program.projections:
            continue
        if is_first and _is_guards(node):
            continue
        is_first = False
        yield number


def settled(program: Program, assignment: Sequence[int]) -> list[int]:
    """`assignment` with items of containers assigned to the part that makes the container."""
    result = list(assignment)
    settle_projections(result, program)
    return result


def distinct_names(wanted: Iterable[str]) -> list[str]:
    """The wanted names as identifiers, numbered where an earlier one is the same."""
    free = FreeNames()
    names = map(identifier, wanted)
    return [free.take(name if name and not name[0].isdigit() else f"part_{name}") for name in names]


def call_user_function(function: Callable[[Argument], Result], argument: Argument, *, node: Node, role: str) -> Result:
    """The result of `function(argument)`; an exception becomes an error that names `role` and `node`."""
    try:
        return function(argument)
    except Exception as error:
        raise CallbackError(
            f"the {role} raised {type(error).__name__} for node {node.name!r}: {error}; nothing was changed"
        ) from error


def user_label(function: Callable[[Node], Hashable], node: Node, *, role: str) -> Hashable:
    """The result of `function(node)`, which must be hashable."""
    label = call_user_function(function, node, node=node, role=role)
    try:
        hash(label)
    except TypeError as error:
        raise CallbackError(
            f"the {role} returned {label!r} for node {node.name!r}, which is not hashable; return a name, a number or "
            "a tuple of these"
        ) from error
    return label


def _largest_pieces(
    program: Program, cut: Cut, pieces: Sequence[Piece], reasons: Mapping[Node, str]
) -> tuple[list[int], dict[Node, str]]:
    """The assignment without all but the largest piece of each group, and the reasons with those of their nodes."""
    sizes = Counter(piece for piece in cut.assignment if piece >= 0)
    largest: dict[int, int] = {}
    for piece, group in enumerate(cut.groups):
        if group not in largest or sizes[piece] > sizes[largest[group]]:
            largest[group] = piece
    kept, outside = list(cut.assignment), dict(reasons)
    for number, piece in enumerate(cut.assignment):
        if piece >= 0 and largest[cut.groups[piece]] != piece:
            kept[number] = ALONE
            outside[program.index.nodes[number]] = (
                f"it cannot run in one call with the rest of {pieces[cut.groups[piece]].name!r}: "
                "something outside must run in between"
            )
    return kept, outside


class Cut(NamedTuple):
    """The piece that each node is assigned to, and for each piece the group that it was cut from."""

    assignment: list[int]
    groups: list[int]


def cut_into_legal_pieces(program: Program, assignment: Sequence[int]) -> Cut:
    """Pieces that data and effects allow; a group that can be called whole stays whole.

    Simulates a run of the graph: a group that waits for nothing outside runs whole; where every group waits for
    another, the one with the earliest node that can run is run as far as it goes. Costs O((N + E) log N).
    """
    items = program.projections
    effects = ((a, b) for a, b in program.effects.edges() if a not in items and b not in items)
    schedule = _Schedule(settled(program, assignment), chain(program.index.edges(), effects))
    while True:
        schedule.run_alone()
        group = schedule.next_group()
        if group is None:
            return Cut(schedule.piece, schedule.groups)
        schedule.run_group(group)


def cut_into_runs(program: Program, assignment: Sequence[int]) -> Cut:
    """A piece for each run of one group in graph order: more pieces, but legal whatever crosses."""
    result, groups, current = list(assignment), [], ALONE
    for number, group in enumerate(assignment):
        if group == NOWHERE or number in program.projections or program.index.nodes[number].op == "get_attr":
            continue
        if group >= 0:
            if group != current:
                groups.append(group)
            result[number] = len(groups) - 1
        current = group
    return Cut(settled(program, result), groups)


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


def _reason(program: Program, number: int) -> str:
    node = program.index.nodes[number]
    if number in program.modes.toggles:
        return ONLY_SWITCHES
    if _is_guards(node):
        return "it checks the inputs of the program"
    if number in program.projections:
        return "it takes an item out of a container that no region makes"
    return "the policy names no region for it"


def _is_guards(node: Node) -> bool:
    # The name that `ExportedProgram.module()` gives the check of its inputs, on torch 2.13.
    return node.op == "call_module" and node.target == "_guards_fn"
