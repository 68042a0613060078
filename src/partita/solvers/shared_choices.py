"""The fastest choices for several parts whose bytes add up, moment by moment: an exact search over numbers.

A part is run one or several times in a step, each time in the same way, so a way adds some bytes to each moment of the
step. The search goes through the parts in order. Two sets of choices differ for what comes later only by the sums that
they add to moments that later parts add to as well; moments that all chosen parts add to alike are one such sum. In a
chain of parts that run once there is one sum, so that the search is the dynamic program over a knapsack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import add, le
from typing import TypeAlias, final


@final
@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a part: how long all of its runs take, and the bytes that they add to each moment of the step."""

    seconds: float
    bytes: tuple[int, ...]


def fastest_ways(menus: Sequence[Sequence[Way]], fixed: Sequence[int], room: int) -> tuple[int, ...] | None:
    """For each part the number of a way, so that no moment takes more than `room`, in the least time, or None.

    `fixed` has the bytes of each moment that no choice changes. Among equally fast choices the one with the lowest peak
    is returned, so less room never gives a higher peak. Exact for up to `_MOST_STATES` undominated states.
    """
    found = _search(menus, fixed, room)
    if found is None:
        # States that were dropped may have been the only ones that fit.
        least = least_peak_of_ways(menus, fixed)
        return least if peak_of_ways(menus, fixed, least) <= room else None
    return found


def least_peak_of_ways(menus: Sequence[Sequence[Way]], fixed: Sequence[int]) -> tuple[int, ...]:
    """The choices with the lowest peak."""
    found = _search([[Way(0.0, way.bytes) for way in menu] for menu in menus], fixed, inf)
    assert found is not None
    return found


def peak_of_ways(menus: Sequence[Sequence[Way]], fixed: Sequence[int], chosen: Sequence[int]) -> int:
    """The bytes of the highest moment."""
    return max(bytes_of_ways(menus, fixed, chosen), default=0)


def bytes_of_ways(menus: Sequence[Sequence[Way]], fixed: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """The bytes of each moment."""
    sums = list(fixed)
    for menu, number in zip(menus, chosen, strict=True):
        sums = list(map(add, sums, menu[number].bytes))
    return tuple(sums)


#: Seconds, the highest moment as far as it is known, sums, and the number of the state before with the way from there.
_State: TypeAlias = tuple[float, float, tuple[int, ...], int, int]
#: More states than this are thinned out; states of several sums take longer to compare.
_MOST_STATES, _MOST_WITH_SUMS = 300, 150


@final
@dataclass(frozen=True, slots=True)
class _Layer:
    """What one part adds to the sums: for each new sum the one that it continues, and what each way adds to it."""

    sources: tuple[int, ...]
    added: tuple[tuple[int, ...], ...]
    #: By how much each sum may rise, and the bytes of the highest moment with that sum beside it.
    slack: tuple[float, ...]
    beside: tuple[int, ...]
    #: The sums that later parts add to.
    stays: tuple[int, ...]


def _search(menus: Sequence[Sequence[Way]], fixed: Sequence[int], room: float) -> tuple[int, ...] | None:
    layers = list(_layers(menus, fixed, room))
    states: list[list[_State]] = [[(0.0, -inf, (0,), 0, 0)]]
    if any(size > room for size in fixed) and not menus:
        return None
    for menu, layer in zip(menus, layers, strict=True):
        grown = list(_grown(states[-1], menu, layer))
        if not grown:
            return None
        states.append(_undominated(grown))
    best = min(range(len(states[-1])), key=lambda at: states[-1][at][:2])
    path = []
    for some in reversed(states[1:]):
        _, _, _, at, number = some[best]
        path.append(number)
        best = at
    return tuple(reversed(path))


def _layers(menus: Sequence[Sequence[Way]], fixed: Sequence[int], room: float) -> Iterator[_Layer]:
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
            tuple(room - high for high in highest),
            tuple(highest),
            tuple(kept),
        )


def _grown(states: Sequence[_State], menu: Sequence[Way], layer: _Layer) -> Iterator[_State]:
    for at, (seconds, highest, sums, _, _) in enumerate(states):
        before = [sums[source] for source in layer.sources]
        for number, way in enumerate(menu):
            after = list(map(add, before, layer.added[number]))
            if all(map(le, after, layer.slack)):
                peak = max(map(add, after, layer.beside), default=highest)
                yield (
                    seconds + way.seconds,
                    max(highest, peak),
                    # The last is the sum of moments that nothing changes any more.
                    (*(after[place] for place in layer.stays), 0),
                    at,
                    number,
                )


def _undominated(states: list[_State]) -> list[_State]:
    """The states that no other one beats; of equal ones the first in the order of choices."""
    states.sort()
    if len(states[0][2]) <= 2:
        return _thinned(list(_along_one_sum(states)), _MOST_STATES)
    states = _thinned(states, 20 * _MOST_WITH_SUMS)
    kept: list[_State] = []
    for state in states:
        if not any(_beats(one, state) for one in kept):
            kept.append(state)
    return _thinned(kept, _MOST_WITH_SUMS)


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


def _thinned(states: list[_State], most: int) -> list[_State]:
    """An even choice of sorted states, with the fastest, and those that are lowest in each sum."""
    if len(states) <= most:
        return states
    lowest = {min(range(len(states)), key=lambda at: (states[at][2][place], at)) for place in range(len(states[0][2]))}
    lowest.add(min(range(len(states)), key=lambda at: (states[at][1], sum(states[at][2]), at)))
    lowest.add(min(range(len(states)), key=lambda at: (max(states[at][2]), at)))
    even = {round(at * (len(states) - 1) / (most - 1)) for at in range(most)}
    return [states[at] for at in sorted(lowest | even)]
