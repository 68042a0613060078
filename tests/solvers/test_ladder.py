"""Less room never gives a plan that takes more memory, nor less time, whatever plans really take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.solvers.chains import STAGES, all_plans

from partita.solvers import peak
from partita.solvers.ladder import Ladder
from partita.solvers.peak import Stage, fastest, ladder_of, least_peak, peak_of, seconds_of

Plan = tuple[int, ...]
#: With few states the plan for a room is no longer the fastest, and may be slower than the one for less room.
_STATES = st.sampled_from([1, 3, 1_000])


def _really(stages: Sequence[Stage], apart: int, salt: int, exact: Sequence[Plan] = ()) -> Callable[[Plan], int]:
    """What plans take that is not what their stages add up to, except for those that are `exact`."""

    def found(plan: Plan) -> int:
        mixed = sum((at + 1) * salt * (number + 1) for at, number in enumerate(plan)) % 97
        return peak_of(stages, plan) + (0 if plan in exact else apart * (mixed % 5 - 2))

    return found


def _fastest_of_all(stages: list[Stage]) -> Plan:
    return min(all_plans(stages), key=lambda plan: (seconds_of(stages, plan), plan))


def _check_order(stages: list[Stage], takes: Callable[[Plan], int], found: list[tuple[int, Plan]]) -> None:
    """`found` has a plan for each room, from the least on."""
    assert all(takes(plan) <= room for room, plan in found)
    peaks, seconds = [takes(plan) for _, plan in found], [seconds_of(stages, plan) for _, plan in found]
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)


@given(STAGES, st.integers(0, 6), st.integers(1, 97), _STATES)
@settings(max_examples=200, deadline=None)
def test_measured_plans_are_in_order(stages: list[Stage], apart: int, salt: int, states: int) -> None:
    measured = _really(stages, apart, salt)
    fast = _fastest_of_all(stages)
    slow = min(all_plans(stages), key=lambda plan: (measured(plan), seconds_of(stages, plan)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak, "_MOST_STATES", states)
        ladder = ladder_of(stages, measured, slow=slow, fast=fast)
        found = [(room, ladder.at(room)) for room in range(measured(slow), measured(fast))]
    _check_order(stages, measured, found)


@given(STAGES, st.integers(0, 6), st.integers(1, 97), _STATES, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_tried_plans_are_in_order_whatever_was_asked_before(
    stages: list[Stage], apart: int, salt: int, states: int, random: Random
) -> None:
    fast, least = _fastest_of_all(stages), least_peak(stages)[0]
    slow = fastest(stages, least) or fast
    # Both ends take what their stages add up to, so nothing warns of the plans between them.
    tried = _really(stages, apart, salt, exact=(slow, fast))
    rooms = list(range(least, peak_of(stages, fast)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak, "_MOST_STATES", states)

        def ladder() -> Ladder:
            return ladder_of(stages, partial(peak_of, stages), slow=slow, fast=fast)

        found = [(room, ladder().at_by_trial(room, tried)) for room in rooms]
        same = ladder()
        again = {room: same.at_by_trial(room, tried) for room in random.sample(rooms, len(rooms))}
    _check_order(stages, tried, found)
    assert again == dict(found)


@given(STAGES)
@settings(max_examples=100, deadline=None)
def test_a_rung_is_the_fastest_plan_where_stages_add_up(stages: list[Stage]) -> None:
    plans, fast, least = all_plans(stages), _fastest_of_all(stages), least_peak(stages)[0]
    sums = partial(peak_of, stages)
    ladder = ladder_of(stages, sums, slow=fastest(stages, least) or fast, fast=fast)
    for room in range(least, sums(fast)):
        expected = min(seconds_of(stages, plan) for plan in plans if sums(plan) <= room)
        assert seconds_of(stages, ladder.at(room)) == expected
        assert ladder.at_by_trial(room, sums) == ladder.at(room)


def test_a_trial_that_is_near_to_its_rung_counts_and_the_next_rung_is_taken_for_another() -> None:
    stages = [peak.Stage(tuple(peak.Choice(3.0 - at, 10 * at, 10 * at, 10 * at) for at in range(4)))]
    ladder = ladder_of(stages, partial(peak_of, stages), slow=(0,), fast=(3,))
    tried = [list[Plan]() for _ in range(4)]
    assert ladder.at_by_trial(25, partial(_noted, tried[0], {})) == (2,)
    assert ladder.at_by_trial(25, partial(_noted, tried[1], {2: 4})) == (2,)
    assert ladder.at_by_trial(23, partial(_noted, tried[2], {2: 4})) == (1,)
    assert ladder.at_by_trial(25, partial(_noted, tried[3], {2: -5, 1: 5})) == (0,)
    assert tried == [[(2,)], [(2,)], [(2,), (1,)], [(2,), (1,)]]


def _noted(tried: list[Plan], more: dict[int, int], plan: Plan) -> int:
    tried.append(plan)
    return 10 * plan[0] + more.get(plan[0], 0)


def test_a_ladder_is_short() -> None:
    stages = [Stage(tuple(peak.Choice(float(99 - at), at**2, at**2, at**2) for at in range(100))) for _ in range(3)]
    asked = list[int]()
    exact = peak.fastest

    def counted(stages: Sequence[Stage], room: int) -> Plan | None:
        asked.append(room)
        return exact(stages, room)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak, "fastest", counted)
        ladder = ladder_of(stages, partial(peak_of, stages), slow=(0, 0, 0), fast=(99, 99, 99))
        for room in range(20_000, 20_100):
            ladder.at(room)
    assert len(asked) < 20  # Rooms that lie close together share the plans of the search.
