"""The fastest choices for a chain of segments whose memory peak fits: a dynamic program over numbers.

A chain runs forward, segment by segment, and backward in reverse. For each segment one choice is made: what it leaves
allocated until its backward, what it needs while it runs, and how long it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import final


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


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """One segment of a chain: its choices, and what is allocated during its backward by the backward of later ones."""

    choices: tuple[Choice, ...]
    #: Gradients that later segments have left, and other bytes that are allocated while this one runs backward.
    before_backward: int = 0

    def needs(self, choice: Choice) -> int:
        """The most that is allocated while the segment runs, forward or backward."""
        return max(choice.forward, choice.backward + self.before_backward)


#: What the first segments leave allocated, a number to minimize, the state before the last of them, and its choice.
_State = tuple[int, float, int, int]


def fastest(stages: Sequence[Stage], room: int) -> tuple[int, ...] | None:
    """For each stage the number of a choice, so that the peak is at most `room` and the time least; None if none fits.

    Among equals the plan that holds least is returned, then the first in the order of choices, so less room never
    gives a plan with a higher peak. Exact for up to `_MOST_STATES` undominated states; of more than these, some are
    dropped, so that a plan that fits may be slower than need be.
    """
    layers: list[list[_State]] = [[(0, 0.0, 0, 0)]]
    for stage in stages:
        choices = [
            (choice.held, choice.seconds, room - stage.needs(choice), number)
            for number, choice in enumerate(stage.choices)
        ]
        grown = [
            (held + more, cost + seconds, at, number)
            for at, (held, cost, _, _) in enumerate(layers[-1])
            for more, seconds, most_before, number in choices
            if held <= most_before
        ]
        if not grown:
            return None
        layers.append(_undominated(grown))
    return _path(layers)


def least_peak(stages: Sequence[Stage]) -> tuple[int, tuple[int, ...]]:
    """The smallest peak of any plan, and the choices of such a plan."""
    layers: list[list[_State]] = [[(0, -inf, 0, 0)]]
    for stage in stages:
        choices = [(choice.held, stage.needs(choice), number) for number, choice in enumerate(stage.choices)]
        grown = [
            (held + more, max(highest, held + needs), at, number)
            for at, (held, highest, _, _) in enumerate(layers[-1])
            for more, needs, number in choices
        ]
        layers.append(_undominated(grown))
    return int(min(layers[-1], key=_by_cost)[1]) if stages else 0, _path(layers)


def peak_of(stages: Sequence[Stage], chosen: Sequence[int]) -> int:
    """The peak of one plan."""
    choices = [stage.choices[number] for stage, number in zip(stages, chosen, strict=True)]
    held = accumulate((choice.held for choice in choices), initial=0)
    return max(before + stage.needs(choice) for before, stage, choice in zip(held, stages, choices, strict=False))


#: More states than this are thinned out.
_MOST_STATES = 20_000


def _undominated(states: list[_State]) -> list[_State]:
    """The states that no other one equals or beats in both numbers; of equals the first in the order of choices."""
    states.sort()
    kept: list[_State] = []
    for state in states:
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    # An even choice, with the one that holds least: whatever fits at all still does.
    return kept if len(kept) <= _MOST_STATES else [*kept[:: 2 * len(kept) // _MOST_STATES + 1], kept[-1]]


def _by_cost(state: _State) -> tuple[float, int]:
    return state[1], state[0]


def _path(layers: Sequence[Sequence[_State]]) -> tuple[int, ...]:
    """The choices that lead to the best of the last states."""
    path: list[int] = []
    at = layers[-1].index(min(layers[-1], key=_by_cost))
    for layer in reversed(layers[1:]):
        _, _, at, number = layer[at]
        path.append(number)
    return tuple(reversed(path))
