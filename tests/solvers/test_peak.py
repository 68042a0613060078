"""The dynamic program over segments finds what trying all plans finds, and less room never means a higher peak."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.work import steps_during
from tests.solvers.chains import STAGES, all_plans

from partita.solvers import peak
from partita.solvers.keep_sets import Item, keep_sets
from partita.solvers.peak import Choice, IfSaved, Stage, fastest, frontier, least_peak, peak_of, seconds_of


@given(STAGES, st.integers(-5, 60))
@settings(max_examples=300, deadline=None)
def test_the_fastest_plan_is_the_fastest_of_all_that_fit(stages: list[Stage], room: int) -> None:
    fitting = [plan for plan in all_plans(stages) if peak_of(stages, plan) <= room]
    found = fastest(stages, room)
    if found is None:
        assert not fitting
        return
    assert peak_of(stages, found) <= room
    assert seconds_of(stages, found) == min(seconds_of(stages, plan) for plan in fitting)


@given(STAGES)
@settings(max_examples=200, deadline=None)
def test_the_least_peak_is_the_least_ofall_plans(stages: list[Stage]) -> None:
    found, plan = least_peak(stages)
    assert found == peak_of(stages, plan) == min(peak_of(stages, one) for one in all_plans(stages))
    assert fastest(stages, found) is not None
    assert fastest(stages, found - 1) is None


@given(STAGES)
@settings(max_examples=100, deadline=None)
def test_less_room_never_gives_a_higher_peak(stages: list[Stage]) -> None:
    peaks = [peak_of(stages, plan) for room in range(70) if (plan := fastest(stages, room)) is not None]
    assert peaks == sorted(peaks)


def _held(stages: list[Stage], plan: tuple[int, ...]) -> int:
    held, saved = 0, frozenset[int]()
    for stage, number in zip(stages, plan, strict=True):
        more, _, saved = stage.run(stage.choices[number], saved)
        held += more
    return held


@given(STAGES, st.integers(-5, 60))
@settings(max_examples=100, deadline=None)
def test_the_frontier_has_the_fastest_plan_for_everything_that_may_be_held(stages: list[Stage], room: int) -> None:
    fitting = {
        (_held(stages, one), seconds_of(stages, one)) for one in all_plans(stages) if peak_of(stages, one) <= room
    }
    found = frontier(stages, room)
    assert all(peak_of(stages, plan) <= room for plan in found)
    expected = [
        (held, seconds)
        for held, seconds in sorted(fitting)
        if not any(other != (held, seconds) and other[0] <= held and other[1] <= seconds for other in fitting)
    ]
    assert [(_held(stages, plan), seconds_of(stages, plan)) for plan in found] == expected


def test_a_value_that_one_stage_saves_stays_allocated_for_the_others() -> None:
    make = Stage((Choice(0, 5, 5, 1), Choice(1, 5, 5, 1, saves=frozenset({7}))))
    read = Stage((Choice(0, -5, 3, 2, if_saved=(IfSaved(7, 5, 2, 5),)),), ends=frozenset({7}))
    last = Stage((Choice(0, 0, 4, 4),))
    assert peak_of([make, read, last], (0, 0, 0)) == 8
    assert peak_of([make, read, last], (1, 0, 0)) == 12
    assert make.run(make.choices[1], frozenset()) == (5, 5, {7})
    # A value that passes by is free in the backward, unless it is saved.
    passing = Stage((Choice(0, 0, 4, 4),), passing=((7, 5),))
    assert passing.run(passing.choices[0], frozenset()) == (0, 4, frozenset())
    assert passing.run(Choice(0, 0, 0, 9), frozenset()) == (0, 4, frozenset())
    assert passing.run(Choice(0, 0, 0, 9), frozenset({7})) == (0, 9, {7})


def test_many_kinds_of_states_are_counted_as_if_they_had_saved_everything() -> None:
    stages = [Stage((Choice(1, 0, 1, 1), Choice(0, 1, 1, 1, saves=frozenset({at})))) for at in range(7)] + [
        Stage((Choice(0, 0, 1, 1, if_saved=tuple(IfSaved(at, 1, 1, 1) for at in range(7))),))
    ]
    found = fastest(stages, 9)
    assert found is not None
    assert peak_of(stages, found) <= 9
    assert fastest(stages, 0) is None


def test_thinned_states_still_fit() -> None:
    stages = [
        Stage(tuple(Choice(float(2**at * (3 - n)), n * 2**at, 2 * 2**at, 2 * 2**at) for n in range(4)))
        for at in range(8)
    ]
    before = peak._MOST_STATES
    try:
        peak._MOST_STATES = 8
        found = fastest(stages, 400)
    finally:
        peak._MOST_STATES = before
    assert found is not None
    assert peak_of(stages, found) <= 400


def test_work_grows_in_proportion_to_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_MOST_STATES", 50)

    def chain(length: int) -> list[Stage]:
        mixed = [at * 0x9E3779B97F4A7C15 % 1009 for at in range(length)]
        menus = [[Choice(10.0, 0, 20, 20), Choice(6.0, 5 + mix % 7, 20, 20), Choice(0.0, 17, 20, 20)] for mix in mixed]
        return [Stage(tuple(menu)) for menu in menus]

    room = 8  # For each stage.
    once = steps_during(fastest, chain(40), room * 40)
    # Four times as long; without a bound on states it takes 16 times.
    assert steps_during(fastest, chain(160), room * 160) < 8 * once


@given(st.lists(st.builds(Item, st.integers(0, 12), st.integers(0, 9).map(float)), max_size=8))
@settings(max_examples=200, deadline=None)
def test_keep_sets_are_the_undominated_subsets(items: list[Item]) -> None:
    every = [
        (sum(items[n].bytes for n in chosen), sum(items[n].seconds for n in chosen))
        for mask in product((False, True), repeat=len(items))
        for chosen in [[n for n, taken in enumerate(mask) if taken]]
    ]
    best = {pair for pair in every if not any((b <= pair[0] and s >= pair[1]) and (b, s) != pair for b, s in every)}
    found = keep_sets(items, most=10_000)
    assert {(one.bytes, one.seconds) for one in found} == best
    for one in found:
        assert one.bytes == sum(items[n].bytes for n in one.items)


def test_a_short_menu_keeps_the_ends_and_what_is_best_for_its_size() -> None:
    items = [Item(3, 30.0), Item(5, 20.0), Item(7, 10.0), Item(11, 9.0), Item(13, 3.0)]
    found = keep_sets(items, most=6)
    assert len(found) <= 6
    assert found[0].items == ()
    assert found[-1].items == (0, 1, 2, 3, 4)
    assert any(one.items == (0,) for one in found)
