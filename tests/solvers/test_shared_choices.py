"""The search over parts of a step finds what trying all choices finds, and less room never means a higher peak."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.work import steps_during
from tests.solvers.steps import STEPS, all_choices

from partita.solvers import shared_choices
from partita.solvers.prices import Way
from partita.solvers.shared_choices import SharedChoices

_Step = tuple[list[list[Way]], list[int]]
#: With few states what is found for a room may be slower than what is found for less room.
_STATES = st.sampled_from([2, 3, 150])


def _fit(choices: SharedChoices, menus: list[list[Way]], room: int) -> list[tuple[int, ...]]:
    return [one for one in all_choices(menus) if choices.peak(one) <= room]


@given(STEPS, st.integers(0, 80))
@settings(max_examples=120, deadline=None)
def test_the_fastest_choice_is_the_fastest_of_all_that_fit(step: _Step, room: int) -> None:
    choices = SharedChoices(*step)
    fitting = _fit(choices, step[0], room)
    if not fitting:
        assert choices.peak(choices.least) > room
        return
    found = choices.fastest_within(room, choices.least)
    assert choices.peak(found) <= room
    best = min((choices.seconds(one), choices.peak(one)) for one in fitting)
    assert (choices.seconds(found), choices.peak(found)) == best


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_the_lowest_peak_is_the_lowest_of_all_and_the_fastest_of_these(step: _Step) -> None:
    choices = SharedChoices(*step)
    found = choices.least
    expected = min((choices.peak(one), choices.seconds(one)) for one in all_choices(step[0]))
    assert (choices.peak(found), choices.seconds(found)) == expected


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_what_is_found_for_a_room_is_the_fastest_that_fits(step: _Step) -> None:
    choices = SharedChoices(*step)
    for room in range(choices.peak(choices.least), 90):
        found = choices.within(room)
        assert found is not None
        assert choices.seconds(found) == min(map(choices.seconds, _fit(choices, step[0], room)))


@given(STEPS, _STATES, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_less_room_never_gives_a_higher_peak_nor_less_time(step: _Step, states: int, random: Random) -> None:
    rooms = list(range(90))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_choices, "_MOST_STATES", states)
        patch.setattr(shared_choices, "_MOST_WITH_SUMS", states)
        choices = SharedChoices(*step)
        smallest = choices.peak(choices.least)
        asked = {room: choices.within(room) for room in random.sample(rooms, len(rooms))}
        alone = {room: SharedChoices(*step).within(room) for room in random.sample(rooms, 5)}
    assert all(asked[room] == found for room, found in alone.items())  # Whatever was asked before.
    found = [one for room in rooms if (one := asked[room]) is not None]
    assert len(found) == len([room for room in rooms if room >= smallest])
    assert all(one is None or choices.peak(one) <= room for room, one in asked.items())
    peaks, seconds = list(map(choices.peak, found)), list(map(choices.seconds, found))
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)


def _chain(parts: int, ways: int, *, calls: int = 1) -> SharedChoices:
    """Parts that hold what they save until their backward, in a step that goes through all of them so many times."""
    count = parts * calls
    moments = 2 * count
    menus = []
    for part in range(parts):
        menu = []
        for number in range(ways):
            held, row = number * (10 + part * 7 % 11) + part * number**2 % 13, [0] * moments
            for call in range(part, count, parts):
                for at in range(call + 1, moments - call - 1):
                    row[at] += held
                row[call] += 300 - number
                row[moments - call - 1] += 300 - number
            seconds = (ways - number) * (5 + part * 5 % 7) + part * number % 3
            menu.append(Way(float(calls * seconds if number < ways - 1 else 0), tuple(row)))
        menus.append(menu)
    return SharedChoices(menus, [0] * moments)


def _middle(choices: SharedChoices) -> int:
    return (choices.peak(choices.least) + choices.peak(choices.fastest)) // 2


def test_a_long_chain_is_filled_up_to_its_budget() -> None:
    """Twenty parts that run once."""
    choices = _chain(20, 20)
    chosen = choices.within(_middle(choices))
    assert chosen is not None
    peak = choices.peak(chosen)
    assert peak <= _middle(choices) < peak + 20


@pytest.mark.parametrize("calls", [1, 3])
def test_few_states_are_enough_for_long_steps(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    choices = _chain(30, 6, calls=calls)
    room = _middle(choices)
    many = choices.seconds(choices.fastest_within(room, choices.least))
    monkeypatch.setattr(shared_choices, "_MOST_STATES", 15)
    monkeypatch.setattr(shared_choices, "_MOST_WITH_SUMS", 15)
    few = choices.seconds(choices.fastest_within(room, choices.least))
    assert few <= 1.01 * many


def test_work_grows_in_proportion_to_the_parts_and_moments() -> None:
    def work(parts: int) -> int:
        choices = _chain(parts, 6)
        return steps_during(choices.fastest_within, _middle(choices), choices.least)

    # Four times as many parts, each with four times as many moments.
    assert work(80) < 24 * work(20)
