"""Limits on regions: connected ones, not too small, not too large, worthwhile; whatever they take out stays legal.

Leaving a region out, or cutting it in graph order, keeps a legal partition legal: the nodes of a region can always run
one by one where the region ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.fx import Node

from partita.errors import CallbackError, OptionError
from partita.graphs.flops import Flops
from partita.graphs.program import Program
from partita.policies.asking import asked
from partita.policies.places import Piece
from partita.regions import Region
from partita.regions.reason import Reason
from partita.solvers.quotient import ALONE

__all__ = ["Limited", "RegionLimits", "Worthwhile", "connected_parts"]

#: Whether a region is worth its call: True or False, a text with the reason to leave it out, or the nodes to keep.
Worthwhile: TypeAlias = Callable[[Region], bool | str | Collection[Node]]


@dataclass(frozen=True, slots=True)
class Limited:
    """The places and pieces that are left, and why nodes were left out."""

    places: list[int]
    pieces: list[Piece]
    reasons: dict[Node, str]


@dataclass(frozen=True, slots=True)
class RegionLimits:
    """What a region must be like."""

    smallest: int = 1
    smallest_flops: int = 0
    largest: int | None = None
    worthwhile: Worthwhile | None = None

    def __post_init__(self) -> None:
        for name, least in (("smallest", 1), ("smallest_flops", 0), ("largest", 1)):
            value = getattr(self, name)
            if (type(value) is not int or value < least) and not (name == "largest" and value is None):
                raise OptionError(f"{name} is a number from {least} on, not {value!r}")
        if self.largest is not None and self.largest < self.smallest:
            raise OptionError(f"no region has at least {self.smallest} and at most {self.largest} operators")
        if self.worthwhile is not None and not callable(self.worthwhile):
            raise OptionError(f"`worthwhile` is a function of a region, not {self.worthwhile!r}")

    def applied(self, program: Program, places: Sequence[int], pieces: Sequence[Piece]) -> Limited:
        """The pieces within the limits: first cut to the largest, then asked, then counted."""
        cut_places, cut_pieces = self._cut(program, places, pieces)
        limited = Limited(cut_places, cut_pieces, {})
        if self.worthwhile is not None:
            self._ask(program, limited, self.worthwhile)
        if self.smallest > 1 or self.smallest_flops:
            self._leave_out_small(program, limited)
        return limited

    def _cut(self, program: Program, places: Sequence[int], pieces: Sequence[Piece]) -> tuple[list[int], list[Piece]]:
        """The pieces of more than `largest` operators cut in graph order."""
        if self.largest is None:
            return list(places), list(pieces)
        items, held, current = frozenset(program.projections), Counter[int](), dict[int, int]()
        result, made = list(places), list[Piece]()
        for number, place in enumerate(places):
            if place < 0 or number in items:
                continue
            if held[place] % self.largest == 0:
                current[place] = len(made)
                part = held[place] // self.largest
                made.append(Piece(f"{pieces[place].name}_{part}", pieces[place].label) if part else pieces[place])
            held[place] += 1
            result[number] = current[place]
        return result, made

    def _ask(self, program: Program, limited: Limited, worthwhile: Worthwhile) -> None:
        for place, numbers in _held(limited.places).items():
            nodes = tuple(program.index.nodes[number] for number in numbers)
            piece = limited.pieces[place]
            answer = asked(worthwhile, Region(piece.name, nodes, piece.label), node=nodes[0], role="`worthwhile`")
            if answer is True:
                continue
            kept, why = _kept(answer, nodes, piece.name)
            reason = Reason(f"its region {piece.name!r} is not worthwhile: {why}", kind="not worthwhile", why=why)
            _leave_out(program, limited, (n for n in numbers if program.index.nodes[n] not in kept), reason)

    def _leave_out_small(self, program: Program, limited: Limited) -> None:
        items, nodes, counter = frozenset(program.projections), program.index.nodes, Flops()
        for place, numbers in _held(limited.places).items():
            operators = sum(number not in items for number in numbers)
            why = ""
            if operators < self.smallest:
                why = f"{operators} of at least {self.smallest} operators"
            elif self.smallest_flops:
                flops = counter.total(nodes[number] for number in numbers)
                why = f"{flops} of at least {self.smallest_flops} FLOPs" if flops < self.smallest_flops else ""
            if why:
                name = limited.pieces[place].name
                reason = Reason(f"its region {name!r} is too small: {why}", kind="not worthwhile", why=why)
                _leave_out(program, limited, numbers, reason)


def connected_parts(program: Program, places: Sequence[int], takers: Sequence[int]) -> tuple[list[int], list[int]]:
    """The parts cut into those that data connects, numbered in graph order, and the taker of each."""
    root = list(range(len(places)))

    def find(number: int) -> int:
        while root[number] != number:
            root[number] = root[root[number]]
            number = root[number]
        return number

    for source, target in program.index.edges():
        if places[source] >= 0 and places[source] == places[target]:
            one, other = find(source), find(target)
            root[max(one, other)] = min(one, other)
    found: dict[int, int] = {}
    result, cut = list(places), list[int]()
    for number in sorted((n for n, place in enumerate(places) if place >= 0), key=lambda n: places[n]):
        part = found.setdefault(find(number), len(cut))
        if part == len(cut):
            cut.append(takers[places[number]])
        result[number] = part
    return result, cut


def _held(places: Sequence[int]) -> dict[int, list[int]]:
    held: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        if place >= 0:
            held.setdefault(place, []).append(number)
    return held


def _kept(answer: Any, nodes: Sequence[Node], name: str) -> tuple[frozenset[Node], str]:
    """The nodes to keep, and why the others go."""
    if answer is False:
        return frozenset(), "`worthwhile` says no"
    if isinstance(answer, str):
        return frozenset(), answer
    if isinstance(answer, Collection) and all(isinstance(node, Node) for node in answer):
        stray = [node.name for node in answer if node not in nodes]
        if stray:
            raise CallbackError(f"`worthwhile` keeps {stray[0]!r}, which is not in region {name!r}")
        return frozenset(answer), "`worthwhile` keeps other nodes of it"
    raise CallbackError(
        f"`worthwhile` answered {answer!r} for region {name!r}; it answers True, False, a reason, or the nodes to keep"
    )


def _leave_out(program: Program, limited: Limited, numbers: Iterable[int], reason: Reason) -> None:
    for number in numbers:
        limited.places[number] = ALONE
        limited.reasons[program.index.nodes[number]] = reason
