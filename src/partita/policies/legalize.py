"""From a label per node to a legal partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, TypeVar, final

from torch.fx import Node

from partita._torch.fx.graph_writer import identifier
from partita.errors import CallbackError, CycleError
from partita.program.program import Program
from partita.regions import Partition, Region
from partita.regions.borders import settle_projections
from partita.regions.region import ONLY_SWITCHES
from partita.solvers.quotient import ALONE, NOWHERE

__all__ = [
    "NO_REASON",
    "Piece",
    "asked",
    "asked_label",
    "distinct_names",
    "legal_partition",
    "no_places",
    "partition_of",
    "placeable",
    "settled",
]


# Asking a user's function about a node, with an error that names the node when the function raises.


#: What stands for a reason that is an empty text.
NO_REASON = "no reason given"

Subject = TypeVar("Subject")
Answer = TypeVar("Answer")


def asked(function: Callable[[Subject], Answer], subject: Subject, *, node: Node, role: str) -> Answer:
    """What `function`, called `role` in the error, answers about `subject`."""
    try:
        return function(subject)
    except Exception as error:
        raise CallbackError(
            f"the {role} raised {type(error).__name__} for node {node.name!r}: {error}; nothing was changed"
        ) from error


def asked_label(function: Callable[[Node], Hashable], node: Node, *, role: str) -> Hashable:
    """What `function` answers about `node`, by which nodes can be told apart."""
    label = asked(function, node, node=node, role=role)
    try:
        hash(label)
    except TypeError as error:
        raise CallbackError(
            f"the {role} answered {label!r} for node {node.name!r}, by which nodes cannot be told apart; it answers "
            "with a name, a number or a tuple of these"
        ) from error
    return label


# A partition from groups that may need each other: legal groups stay as they are, the others are repaired.


def legal_partition(
    program: Program,
    places: Sequence[int],
    pieces: Sequence[Piece],
    reasons: Mapping[Node, str] = MappingProxyType({}),
    *,
    only_largest: bool = False,
) -> Partition:
    """The groups as regions; those that cannot be called at once become several regions, or the largest of these."""

    def repaired(cut: Cut) -> Partition:
        kept, outside = _largest_pieces(program, cut, pieces, reasons) if only_largest else (cut.places, dict(reasons))
        return partition_of(program, kept, [pieces[group] for group in cut.groups], outside)

    try:
        return partition_of(program, places, pieces, reasons)
    except CycleError:
        pass
    try:
        return repaired(cut_into_legal_pieces(program, places))
    except CycleError:  # A symbol that crosses a border adds an edge, which nobody knows before the cut.
        return repaired(cut_into_runs(program, places))


def _largest_pieces(
    program: Program, cut: Cut, pieces: Sequence[Piece], reasons: Mapping[Node, str]
) -> tuple[list[int], dict[Node, str]]:
    """The places without the lesser pieces of each group, and the reasons with those of their nodes."""
    sizes = Counter(place for place in cut.places if place >= 0)
    largest: dict[int, int] = {}
    for piece, group in enumerate(cut.groups):
        if group not in largest or sizes[piece] > sizes[largest[group]]:
            largest[group] = piece
    kept, outside = list(cut.places), dict(reasons)
    for number, piece in enumerate(cut.places):
        if piece >= 0 and largest[cut.groups[piece]] != piece:
            kept[number] = ALONE
            outside[program.index.nodes[number]] = (
                f"it cannot run in one call with the rest of {pieces[cut.groups[piece]].name!r}: "
                "something outside must run in between"
            )
    return kept, outside


# Legal pieces: groups of nodes that may need each other, cut into pieces that can be called one after another.


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


# Places: the piece that each node of a program goes into, by node number, and the partition that this makes.
#
# A place is the number of a piece, or `ALONE` or `NOWHERE` as in the quotient graph. Where places never fall along an
# edge, pieces can be called in the order of their numbers, so runs of the graph are always legal.


@dataclass(frozen=True, slots=True)
class Piece:
    """What will be a region: the name it asks for, and what the policy calls it."""

    name: str
    label: Hashable = None


def no_places(program: Program) -> list[int]:
    """The places of a program in which every node is left out."""
    places = [NOWHERE if node.op in ("placeholder", "output") else ALONE for node in program.index.nodes]
    for number in program.modes.toggles:
        places[number] = NOWHERE
    return places


def placeable(program: Program) -> Iterator[int]:
    """The nodes that a policy can place, by number, in graph order.

    Mode toggles have no place, items of containers follow the container, and the guards of an exported program check
    its inputs, which is nobody's work but the program's own.
    """
    nodes, toggles, is_first = program.index.nodes, program.modes.toggles, True
    items = settled(program, range(len(nodes)))[1]
    for number, node in enumerate(nodes):
        if node.op in _NO_OPERATORS or number in toggles or number in items:
            continue
        if is_first and _is_guards(node):
            continue
        is_first = False
        yield number


def settled(program: Program, places: Sequence[int]) -> tuple[list[int], frozenset[int]]:
    """`places`, with items of containers beside what makes the container, and the numbers of those items."""
    result = list(places)
    settle_projections(result, program)
    return result, frozenset(program.projections)


def partition_of(
    program: Program, places: Sequence[int], pieces: Sequence[Piece], reasons: Mapping[Node, str] | None = None
) -> Partition:
    """The partition with a region for each piece that holds a node, and a reason for each operator outside."""
    nodes = program.index.nodes
    held: list[list[Node]] = [[] for _ in pieces]
    outside = dict(reasons or {})
    for number, place in enumerate(settled(program, places)[0]):
        if place >= 0:
            held[place].append(nodes[number])
            outside.pop(nodes[number], None)
        elif nodes[number].op not in _NO_OPERATORS and nodes[number] not in outside:
            outside[nodes[number]] = _reason(program, number)
    used = [(piece, tuple(inside)) for piece, inside in zip(pieces, held, strict=True) if inside]
    names = distinct_names(piece.name for piece, _ in used)
    regions = [Region(name, inside, piece.label) for name, (piece, inside) in zip(names, used, strict=True)]
    return Partition(program, regions, outside)


def _is_guards(node: Node) -> bool:
    # The name that `ExportedProgram.module()` gives the check of its inputs, on torch 2.13.
    return node.op == "call_module" and node.target == "_guards_fn"


def _reason(program: Program, number: int) -> str:
    node = program.index.nodes[number]
    if number in program.modes.toggles:
        return ONLY_SWITCHES
    if _is_guards(node):
        return "it checks the inputs of the program"
    if number in program.projecting:
        return "it takes an item out of a container that no region makes"
    return "the policy names no region for it"


_NO_OPERATORS = frozenset(("placeholder", "get_attr", "output"))


# Names for regions: identifiers, each of them different.


def distinct_names(wanted: Iterable[str]) -> list[str]:
    """The wanted names as identifiers, numbered where an earlier one is the same."""
    taken: set[str] = set()
    repeats: dict[str, int] = {}
    names = []
    for text in wanted:
        base = name = _identifier(text)
        while name in taken:
            repeats[base] = repeats.get(base, 0) + 1
            name = f"{base}_{repeats[base]}"
        taken.add(name)
        names.append(name)
    return names


def _identifier(text: str) -> str:
    name = identifier(text)
    return name if name and not name[0].isdigit() else f"part_{name}"
