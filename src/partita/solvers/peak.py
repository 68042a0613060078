"""The fastest choices for a chain of segments whose memory peak fits: a dynamic program over numbers.

A chain runs forward, segment by segment, and backward in reverse. For each segment one choice is made: what it leaves
allocated until its backward, what it needs while it runs, and how long it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True, slots=True)
class _State:
    """Choices for the first segments: what they leave allocated, a number to minimize, and the choices."""

    held: int
    cost: float
    path: tuple[int, ...]


def fastest(stages: Sequence[Stage], room: int) -> tuple[int, ...] | None:
    """For each stage the number of a choice, so that the peak is at most `room` and the time least; None if none fits.

    Among equals the plan that holds least is returned, then the first in the order of choices, so less room never
    gives a plan with a higher peak. Exact for up to `_MOST_STATES` undominated states; of more than these, some are
    dropped, so that a plan that fits may be slower than need be.
    """
    states = [_State(0, 0.0, ())]
    for stage in stages:
        grown = (
            _State(state.held + choice.held, state.cost + choice.seconds, (*state.path, number))
            for state in states
            for number, choice in enumerate(stage.choices)
            if state.held + stage.needs(choice) <= room
        )
        states = _undominated(grown)
        if not states:
            return None
    return min(states, key=lambda state: (state.cost, state.held, state.path)).path


def least_peak(stages: Sequence[Stage]) -> tuple[int, tuple[int, ...]]:
    """The smallest peak of any plan, and the choices of such a plan."""
    states = [_State(0, -inf, ())]
    for stage in stages:
        grown = (
            _State(state.held + choice.held, max(state.cost, state.held + stage.needs(choice)), (*state.path, number))
            for state in states
            for number, choice in enumerate(stage.choices)
        )
        states = _undominated(grown)
    best = min(states, key=lambda state: (state.cost, state.held, state.path))
    return int(best.cost) if stages else 0, best.path


def peak_of(stages: Sequence[Stage], chosen: Sequence[int]) -> int:
    """The peak of one plan."""
    choices = [stage.choices[number] for stage, number in zip(stages, chosen, strict=True)]
    held = accumulate((choice.held for choice in choices), initial=0)
    return max(before + stage.needs(choice) for before, stage, choice in zip(held, stages, choices, strict=False))


#: More states than this are thinned out.
_MOST_STATES = 20_000


def _undominated(states: Iterable[_State]) -> list[_State]:
    """The states that no other one equals or beats in both numbers; of equals the first in the order of choices."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: (state.held, state.cost, state.path)):
        if not kept or state.cost < kept[-1].cost:
            kept.append(state)
    return kept if len(kept) <= _MOST_STATES else _thinned(kept)


def _thinned(states: Sequence[_State]) -> list[_State]:
    """An even choice of the states, with the one that holds least: whatever fits at all still does."""
    return [*states[:: 2 * len(states) // _MOST_STATES + 1], states[-1]]
