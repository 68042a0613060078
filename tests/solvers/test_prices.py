"""No plan within the room is faster than a bound, and none with some ways faster than that and their excesses."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.solvers.steps import STEPS, all_choices

from partita.solvers.prices import Bound, Way, bound_of, bytes_of_ways, seconds_of_ways

_Step = tuple[list[list[Way]], list[int]]


def _bound(step: _Step, room: int) -> tuple[Bound, list[tuple[int, ...]]] | None:
    """The bound for a room, and all plans that fit; it begins with the slowest of them."""
    menus, fixed = step
    fitting = [one for one in all_choices(menus) if max(bytes_of_ways(menus, fixed, one)) <= room]
    if not fitting:
        return None
    slowest = max(fitting, key=lambda one: seconds_of_ways(menus, one))
    return bound_of(menus, fixed, room, plan=slowest, fits=fitting.__contains__), fitting


@given(STEPS, st.integers(0, 80))
@settings(max_examples=200, deadline=None)
def test_every_plan_that_fits_is_slower_than_the_bound_by_the_excesses_of_its_ways(step: _Step, room: int) -> None:
    made = _bound(step, room)
    if made is None:
        return
    bound, fitting = made
    for one in fitting:
        excess = sum(some[number] for some, number in zip(bound.excesses, one, strict=True))
        seconds = seconds_of_ways(step[0], one)
        assert seconds >= bound.seconds + excess - 1e-6
        assert excess <= bound.most or seconds > bound.known


@given(STEPS, st.integers(0, 80))
@settings(max_examples=100, deadline=None)
def test_the_known_plan_fits(step: _Step, room: int) -> None:
    made = _bound(step, room)
    if made is not None:
        bound, fitting = made
        assert bound.plan in fitting
        assert bound.known == seconds_of_ways(step[0], bound.plan)


def test_prices_come_near_to_what_mixtures_of_ways_would_take() -> None:
    """A hundred parts that may hold 0, 4 or 10 bytes: in a room of 200, half of them hold 4 at best."""
    menu = [Way(9.0, (0,)), Way(4.0, (4,)), Way(0.0, (10,))]
    menus, slowest = [menu] * 100, (0,) * 100
    bound = bound_of(menus, [0], 200, plan=slowest, fits=lambda one: bytes_of_ways(menus, [0], one)[0] <= 200)
    assert 0.99 * 650 <= bound.seconds <= 650
    assert bound.with_plan((1,) * 50 + (0,) * 50, 650.0).most <= 0.01 * 650
    assert bound.with_plan(slowest, 900.0) == bound


def test_a_room_for_everything_has_the_fastest_ways() -> None:
    bound = bound_of([[Way(2.0, (0,)), Way(1.0, (5,))]], [3], 8, plan=(0,), fits=lambda _: True)
    assert (bound.plan, bound.seconds, bound.known) == ((1,), 1.0, 1.0)
    assert bound.excesses == ((1.0, 0.0),)
