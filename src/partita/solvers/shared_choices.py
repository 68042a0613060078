"""The fastest choices for several parts whose bytes add up, moment by moment: an exact search over numbers.

A part is run one or several times in a step, each time in the same way, so a way adds some bytes to each moment of the
step. The search goes through the parts in order. Two sets of choices differ for what comes later only by the sums that
they add to moments that later parts add to as well; moments that all chosen parts add to alike are one such sum. In a
chain of parts that run once there is one sum, so that the search is the dynamic program over a knapsack. Sets that
`prices` show to be slower than a plan that is known are left out; of too many others, those that promise least are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from operator import add, le
from typing import TypeAlias, final

from partita.solvers.ladder import Ladder
from partita.solvers.prices import Bound, Menus, Way, bound_of, bytes_of_ways, seconds_of_ways


@final
class SharedChoices:
    """The choices for all parts of a step: for each part the number of a way.

    `fixed` has the bytes of each moment that no choice changes.
    """

    def __init__(self, menus: Menus, fixed: Sequence[int]) -> None:
        self.menus, self.fixed = menus, fixed

    def bytes(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """The bytes of each moment."""
        return bytes_of_ways(self.menus, self.fixed, chosen)

    def peak(self, chosen: Sequence[int]) -> int:
        """The bytes of the highest moment."""
        return max(self.bytes(chosen), default=0)

    def seconds(self, chosen: Sequence[int]) -> float:
        """The time of all parts."""
        return seconds_of_ways(self.menus, chosen)

    def within(self, room: int) -> tuple[int, ...] | None:
        """Choices that take about `room` bytes and not more; None if those with the lowest peak take more.

        Less room never gives a higher peak, nor less time.
        """
        if self.peak(self.fastest) <= room:
            return self.fastest
        return self._ladder.at(room) if self.peak(self.least) <= room else None

    @cached_property
    def least(self) -> tuple[int, ...]:
        """The choices with the lowest peak, as far as it is known, and of these the fastest."""
        zero = [[Way(0.0, way.bytes) for way in menu] for menu in self.menus]
        found = _search(zero, self._layers, inf)
        lowest = self._plain if found is None else min(found, self._plain, key=self.peak)
        return self.fastest_within(self.peak(lowest), lowest)

    @cached_property
    def fastest(self) -> tuple[int, ...]:
        """The fastest choices, and of these the ones with the lowest peak."""
        return self.fastest_within(self.peak(self._plain), self._plain)

    def fastest_within(self, room: int, known: tuple[int, ...]) -> tuple[int, ...]:
        """The choices in which no moment takes more than `room`, in the least time; `known` are some.

        Among equally fast ones those with the lowest peak are returned. Exact for up to `_MOST_STATES` undominated
        states. Of more than these, some are dropped, so that less room could give a higher peak, or less time.
        """
        bound = bound_of(self.menus, self.fixed, room, plan=known, fits=lambda one: self.peak(one) <= room)
        seen = [bound.plan]
        # What a quick search finds leaves less to the thorough one.
        for part in (_QUICK, 1):
            found = _search(self.menus, self._layers, room, bound, part)
            if found is not None:
                seen.append(found)
                bound = bound.with_plan(found, self.seconds(found))
        return min(seen, key=lambda one: (self.seconds(one), self.peak(one)))

    @cached_property
    def _plain(self) -> tuple[int, ...]:
        """The fastest way of each part."""
        return tuple(min(range(len(menu)), key=lambda at: menu[at].seconds) for menu in self.menus)

    @cached_property
    def _ladder(self) -> Ladder:
        find = partial(self.fastest_within, known=self.least)
        return Ladder(find, measured=self.peak, seconds=self.seconds, slow=self.least, fast=self.fastest)

    @cached_property
    def _layers(self) -> list[_Layer]:
        return list(_layers(self.menus, self.fixed))


#: Seconds, the highest moment as far as it is known, sums, the number of the state before with the way from there, and
#: the excesses of all ways.
_State: TypeAlias = tuple[float, float, tuple[int, ...], int, int, float]
#: More states than this are thinned out; states of several sums take longer to compare.
_MOST_STATES, _MOST_WITH_SUMS = 150, 50
#: A quick search has so many times fewer states.
_QUICK = 10


@final
@dataclass(frozen=True, slots=True)
class _Layer:
    """What one part adds to the sums: for each new sum the one that it continues, and what each way adds to it."""

    sources: tuple[int, ...]
    added: tuple[tuple[int, ...], ...]
    #: The least bytes of the highest moment with each sum, beside that sum.
    beside: tuple[int, ...]
    #: The sums that later parts add to.
    stays: tuple[int, ...]


def _search(
    menus: Menus, layers: Sequence[_Layer], room: float, bound: Bound | None = None, part: int = 1
) -> tuple[int, ...] | None:
    """The fastest choices within the room, as far as they are found with one `part` of the states."""
    excesses = bound.excesses if bound else [(0.0,) * len(menu) for menu in menus]
    most = bound.most if bound else inf
    states: list[list[_State]] = [[(0.0, -inf, (0,), 0, 0, 0.0)]]
    for menu, excess, layer in zip(menus, excesses, layers, strict=True):
        promising = [(number, way, excess[number]) for number, way in enumerate(menu) if excess[number] <= most]
        grown = list(_grown(states[-1], promising, layer, room, most))
        if not grown:
            return None
        states.append(_undominated(grown, part, is_priced=bound is not None))
    best = min(range(len(states[-1])), key=lambda at: states[-1][at][:2])
    path = []
    for some in reversed(states[1:]):
        _, _, _, at, number, _ = some[best]
        path.append(number)
        best = at
    return tuple(reversed(path))


def _layers(menus: Menus, fixed: Sequence[int]) -> Iterator[_Layer]:
    moments = range(len(fixed))
    lowest = [[min(way.bytes[at] for way in menu) for at in moments] for menu in menus]
    # The least that each moment takes, whatever is chosen.
    least = [sum(column) for column in zip(fixed, *lowest, strict=True)]
    columns = [
        [tuple(way.bytes[at] - low[at] for way in menu) for at in moments]
        for menu, low in zip(menus, lowest, strict=True)
    ]
    varies = [[any(column) for column in part] for part in columns]
    last = [max((number for number, part in enumerate(varies) if part[at]), default=-1) for at in moments]
    sum_of = dict.fromkeys(moments, 0)
    for number, part in enumerate(columns):
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for at in moments:
            groups.setdefault((sum_of[at], part[at]), []).append(at)
        kept = [place for place, members in enumerate(groups.values()) if any(last[at] > number for at in members)]
        highest = [max(least[at] for at in members) for members in groups.values()]
        # Sums that no later part changes have been checked, and are dropped.
        place_of = {place: new for new, place in enumerate(kept)}
        for place, members in enumerate(groups.values()):
            sum_of.update(dict.fromkeys(members, place_of.get(place, len(kept))))
        yield _Layer(
            tuple(source for source, _ in groups),
            tuple(zip(*(column for _, column in groups), strict=True)),
            tuple(highest),
            tuple(kept),
        )


def _grown(
    states: Sequence[_State], menu: Sequence[tuple[int, Way, float]], layer: _Layer, room: float, most: float
) -> Iterator[_State]:
    """The states after a part that fit, with those ways of it that may be part of fast enough choices."""
    for at, (seconds, highest, sums, _, _, excess) in enumerate(states):
        before = [sums[source] for source in layer.sources]
        for number, way, more in menu:
            if excess + more > most:
                continue
            after = list(map(add, before, layer.added[number]))
            peak = max(map(add, after, layer.beside), default=highest)
            if peak <= room:
                yield (
                    seconds + way.seconds,
                    max(highest, peak),
                    # The last is the sum of moments that nothing changes any more.
                    (*(after[place] for place in layer.stays), 0),
                    at,
                    number,
                    excess + more,
                )


def _undominated(states: list[_State], part: int, *, is_priced: bool) -> list[_State]:
    """The states that no other one beats; of equal ones the first in the order of choices."""
    states.sort()
    thinned = _most_promising if is_priced else _evenly
    if len(states[0][2]) <= 2:
        return thinned(list(_along_one_sum(states)), max(_MOST_STATES // part, 2))
    most = max(_MOST_WITH_SUMS // part, 2)
    states = thinned(states, 20 * most)
    kept: list[_State] = []
    for state in states:
        if not any(_beats(one, state) for one in kept):
            kept.append(state)
    return thinned(kept, most)


def _along_one_sum(states: Sequence[_State]) -> Iterator[_State]:
    """The undominated ones of sorted states with one sum."""
    least, current, equal = inf, -inf, list[_State]()
    for state in states:
        if state[0] > current:
            least, current, equal = min((least, *(one[2][0] for one in equal))), state[0], []
        if state[2][0] < least and not any(_beats(one, state) for one in equal):
            equal.append(state)
            yield state


def _beats(one: _State, other: _State) -> bool:
    """Whether nothing that begins with `other` is better than the same with `one`, which is no slower."""
    return (one[0] < other[0] or one[1] <= other[1]) and all(map(le, one[2], other[2]))


def _evenly(states: list[_State], most: int) -> list[_State]:
    """An even choice of sorted states, with the fastest, and those that are lowest in each sum."""
    if len(states) <= most:
        return states
    even = {round(at * (len(states) - 1) / (most - 1)) for at in range(most)}
    return [states[at] for at in sorted(_lowest(states) | even)]


def _most_promising(states: list[_State], most: int) -> list[_State]:
    """Those of sorted states that exceed the bound least, and those that are lowest in each sum."""
    if len(states) <= most:
        return states
    promising = sorted(range(len(states)), key=lambda at: (states[at][5], at))[:most]
    return [states[at] for at in sorted(_lowest(states).union(promising))]


def _lowest(states: list[_State]) -> set[int]:
    lowest = {min(range(len(states)), key=lambda at: (states[at][2][place], at)) for place in range(len(states[0][2]))}
    lowest.add(min(range(len(states)), key=lambda at: (states[at][1], sum(states[at][2]), at)))
    lowest.add(min(range(len(states)), key=lambda at: (max(states[at][2]), at)))
    return lowest
