"""The fastest choices for a chain of segments whose memory peak fits: a dynamic program over numbers.

A chain runs forward, segment by segment, and backward in reverse. For each segment one choice is made: what it leaves
allocated until its backward, what it needs while it runs, and how long it takes. A value that several segments share
stays allocated if one of them saves it, so a choice also says what it saves, and what it needs more if others did.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from typing import final

from partita.solvers.ladder import Ladder


@final
@dataclass(frozen=True, slots=True)
class IfSaved:
    """What a choice takes more, after its forward and at the most, if an earlier segment has saved a value it reads."""

    value: int
    held: int
    forward: int
    backward: int


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a segment. All bytes are relative to what is allocated just before its forward."""

    seconds: float
    #: Allocated after its forward, until its backward; negative if it frees more than it allocates.
    held: int
    #: The most that is allocated while its forward runs.
    forward: int
    #: The most that is allocated while its backward runs, without what later segments leave.
    backward: int
    #: The values that it saves until its backward, of those that segments share.
    saves: frozenset[int] = frozenset()
    if_saved: tuple[IfSaved, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """One segment of a chain: its choices, and what is allocated during its backward by the backward of later ones."""

    choices: tuple[Choice, ...]
    #: Gradients that later segments have left, and other bytes that are allocated while this one runs backward.
    before_backward: int = 0
    #: The values that no later segment reads.
    ends: frozenset[int] = frozenset()
    #: Values of earlier segments that later ones read and this one does not, with their bytes: free in the backward of
    #: this one unless they are saved by then.
    passing: tuple[tuple[int, int], ...] = ()

    def run(self, choice: Choice, saved: frozenset[int]) -> tuple[int, int, frozenset[int]]:
        """What it leaves allocated, the most that it takes, and what is saved after it, if `saved` is before it."""
        held, forward, backward = choice.held, choice.forward, choice.backward
        for more in choice.if_saved:
            if more.value in saved:
                held, forward, backward = held + more.held, forward + more.forward, backward + more.backward
        backward -= self.passed(saved)
        return held, max(forward, backward + self.before_backward), (saved | choice.saves) - self.ends

    def passed(self, saved: frozenset[int]) -> int:
        """The bytes that are allocated before its forward, but not in its backward."""
        return sum(size for value, size in self.passing if value not in saved)


#: What the first segments leave allocated, a number to minimize, the state before the last of them, and its choice.
#: Plain numbers, since Python's garbage collector visits tuples of anything else again and again.
_State = tuple[int, float, int, int]
#: States by what is saved that later segments read; they are numbered in order.
_States = dict[frozenset[int], list[_State]]
_NOTHING: frozenset[int] = frozenset()


def fastest(stages: Sequence[Stage], room: int) -> tuple[int, ...] | None:
    """For each stage the number of a choice, so that the peak is at most `room` and the time least; None if none fits.

    Among equals the plan that holds least is returned, then the first in the order of choices. Exact for up to
    `_MOST_STATES` undominated states; of more than these, some are dropped, so that a plan that fits may be slower than
    need be, and even slower than the one for less room. A `Ladder` has plans for all rooms that are in order.
    """
    layers: list[_States] = [{_NOTHING: [(0, 0.0, 0, 0)]}]
    for stage in stages:
        grown = _grown(layers[-1], stage, room)
        if not grown:
            return None
        layers.append(_best(grown))
    return _path(layers)


def ladder_of(
    stages: Sequence[Stage],
    measured: Callable[[tuple[int, ...]], int],
    *,
    slow: tuple[int, ...],
    fast: tuple[int, ...],
) -> Ladder:
    """The plans between two; `measured` gives the peak of a plan, which need not be what the stages add up to."""
    rooms = least_peak(stages)[0], peak_of(stages, fast)
    seconds = partial(seconds_of, stages)
    return Ladder(partial(fastest, stages), measured=measured, seconds=seconds, slow=slow, fast=fast, rooms=rooms)


def seconds_of(stages: Sequence[Stage], chosen: Sequence[int]) -> float:
    """The time that one plan takes."""
    return sum(stage.choices[number].seconds for stage, number in zip(stages, chosen, strict=True))


def frontier(stages: Sequence[Stage], room: int) -> list[tuple[int, ...]]:
    """The choices whose peak is at most `room` of which none both holds less and is faster, the fastest last."""
    layers: list[_States] = [{_NOTHING: [(0, 0.0, 0, 0)]}]
    for stage in stages:
        grown = _grown(layers[-1], stage, room)
        if not grown:
            return []
        layers.append(_best(grown))
    flat = _flat(layers)
    found, least = list[tuple[int, ...]](), inf
    for at, (_, seconds, _, _) in sorted(enumerate(flat[-1]), key=lambda pair: pair[1][:2]):
        if seconds < least:
            least = seconds
            found.append(_path_to(flat, at))
    return found


def _grown(states: _States, stage: Stage, room: int) -> _States:
    """The states after a stage that fit; those of one choice follow each other, so that they are sorted in runs."""
    grown: _States = {}
    first = 0
    for saved, some in states.items():
        helds = [state[0] for state in some]
        for number, choice in enumerate(stage.choices):
            more, needs, after = stage.run(choice, saved)
            seconds = choice.seconds
            fitting = some[: bisect_right(helds, room - needs)]
            if fitting:
                grown.setdefault(after, []).extend(
                    [(held + more, cost + seconds, at, number) for at, (held, cost, _, _) in enumerate(fitting, first)]
                )
        first += len(some)
    return grown


def least_peak(stages: Sequence[Stage]) -> tuple[int, tuple[int, ...]]:
    """The smallest peak of any plan, and the choices of such a plan."""
    layers: list[_States] = [{_NOTHING: [(0, -inf, 0, 0)]}]
    for stage in stages:
        grown: _States = {}
        first = 0
        for saved, some in layers[-1].items():
            for number, choice in enumerate(stage.choices):
                more, needs, after = stage.run(choice, saved)
                grown.setdefault(after, []).extend(
                    (held + more, max(highest, held + needs), at, number)
                    for at, (held, highest, _, _) in enumerate(some, first)
                )
            first += len(some)
        layers.append(_best(grown))
    chosen = _path(layers)
    return peak_of(stages, chosen), chosen


def peak_of(stages: Sequence[Stage], chosen: Sequence[int]) -> int:
    """The peak of one plan."""
    held, highest, saved = 0, list[int](), _NOTHING
    for stage, number in zip(stages, chosen, strict=True):
        more, needs, saved = stage.run(stage.choices[number], saved)
        highest.append(held + needs)
        held += more
    return max(highest, default=0)


#: More states than this are thinned out.
_MOST_STATES = 1_000
#: If states differ in more ways in what is saved, all count as if they had saved everything that any of them has.
_MOST_KINDS = 32


def _best(states: _States) -> _States:
    """The undominated states among those with the same saved values."""
    if len(states) > _MOST_KINDS:
        states = {_NOTHING.union(*states): [state for some in states.values() for state in some]}
    most = max(_MOST_STATES // len(states), 2)
    return {kind: _undominated(states[kind], most) for kind in sorted(states, key=sorted)}


def _undominated(states: list[_State], most: int) -> list[_State]:
    """The states that no other one equals or beats in both numbers; of equals the first in the order of choices."""
    states.sort()
    kept: list[_State] = []
    for state in states:
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    if len(kept) <= most:
        return kept
    # The ones that are nearest to the best price of memory, and an even choice of the others.
    prices = _above_hull(kept)
    near = set(sorted(range(len(kept)), key=prices.__getitem__)[: most // 2])
    even = {round(at * (len(kept) - 1) / (most // 2)) for at in range(most // 2)}
    # The first holds least: whatever fits at all still does.
    return [kept[at] for at in sorted(near | even | {0, len(kept) - 1})]


def _above_hull(states: Sequence[_State]) -> list[float]:
    """How much each state costs more than a mixture of others that holds as much; they hold more and cost less."""
    hull: list[int] = []
    for at, (held, cost, _, _) in enumerate(states):
        while len(hull) > 1:
            (low, most, _, _), (middle, less, _, _) = states[hull[-2]], states[hull[-1]]
            if (less - most) * (held - low) < (cost - most) * (middle - low):
                break
            hull.pop()
        hull.append(at)
    above = [0.0] * len(states)
    for start, stop in pairwise(hull):
        first, last = states[start], states[stop]
        slope = (last[1] - first[1]) / (last[0] - first[0])
        for at in range(start + 1, stop):
            above[at] = states[at][1] - first[1] - slope * (states[at][0] - first[0])
    return above


def _by_cost(state: _State) -> tuple[float, int]:
    return state[1], state[0]


def _path(layers: Sequence[_States]) -> tuple[int, ...]:
    """The choices that lead to the best of the last states."""
    flat = _flat(layers)
    return _path_to(flat, flat[-1].index(min(flat[-1], key=_by_cost)))


def _flat(layers: Sequence[_States]) -> list[list[_State]]:
    """The states of each layer as they are numbered."""
    return [[state for some in layer.values() for state in some] for layer in layers]


def _path_to(flat: Sequence[list[_State]], at: int) -> tuple[int, ...]:
    """The choices that lead to one of the last states."""
    path: list[int] = []
    for layer in reversed(flat[1:]):
        _, _, at, number = layer[at]
        path.append(number)
    return tuple(reversed(path))
