"""The search over parts of a step finds what trying all choices finds, and less room never means a higher peak."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from partita.solvers import shared_choices
from partita.solvers.shared_choices import Way, bytes_of_ways, fastest_ways, least_peak_of_ways, peak_of_ways


@st.composite
def _steps(draw: st.DrawFn) -> tuple[list[list[Way]], list[int]]:
    """The calls of a step: each moment is the forward or the backward of one, and calls of a part are all alike."""
    parts = draw(st.integers(1, 4))
    calls = draw(st.lists(st.integers(0, parts - 1), min_size=1, max_size=6))
    # A backward comes anywhere after its forward: in reverse order in most steps, but not in all.
    order: list[tuple[int, bool]] = [(number, True) for number in range(len(calls))]
    for number in reversed(range(len(calls))):
        earliest = order.index((number, True)) + 1
        order.insert(draw(st.sampled_from([len(order), draw(st.integers(earliest, len(order)))])), (number, False))
    ways = [
        [
            (draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(st.integers(0, 12)), draw(st.integers(0, 12)))
            for _ in range(draw(st.integers(1, 4)))
        ]
        for _ in range(parts)
    ]
    menus = []
    for part, some in enumerate(ways):
        own = [number for number, called in enumerate(calls) if called == part]
        menus.append(
            [
                Way(
                    float(seconds * len(own)),
                    tuple(
                        sum(
                            (forward if is_forward else backward)
                            if number == one
                            else held * _is_between(order, one, at)
                            for one in own
                        )
                        for at, (number, is_forward) in enumerate(order)
                    ),
                )
                for seconds, held, forward, backward in some
            ]
        )
    return menus, [draw(st.integers(0, 5)) for _ in order]


def _is_between(order: list[tuple[int, bool]], number: int, at: int) -> bool:
    return order.index((number, True)) < at < order.index((number, False))


def _all_choices(menus: list[list[Way]]) -> list[tuple[int, ...]]:
    return list(product(*(range(len(menu)) for menu in menus)))


def _seconds(menus: list[list[Way]], chosen: tuple[int, ...]) -> float:
    return sum(menu[number].seconds for menu, number in zip(menus, chosen, strict=True))


@given(_steps(), st.integers(0, 80))
@settings(max_examples=120, deadline=None)
def test_the_fastest_choice_is_the_fastest_of_all_that_fit(step: tuple[list[list[Way]], list[int]], room: int) -> None:
    menus, fixed = step
    fitting = [one for one in _all_choices(menus) if peak_of_ways(menus, fixed, one) <= room]
    found = fastest_ways(menus, fixed, room)
    if found is None:
        assert not fitting
        return
    assert peak_of_ways(menus, fixed, found) <= room
    best = min((_seconds(menus, one), peak_of_ways(menus, fixed, one)) for one in fitting)
    assert (_seconds(menus, found), peak_of_ways(menus, fixed, found)) == best


@given(_steps())
@settings(max_examples=60, deadline=None)
def test_the_lowest_peak_is_the_lowest_of_all(step: tuple[list[list[Way]], list[int]]) -> None:
    menus, fixed = step
    found = peak_of_ways(menus, fixed, least_peak_of_ways(menus, fixed))
    assert found == min(peak_of_ways(menus, fixed, one) for one in _all_choices(menus))
    assert fastest_ways(menus, fixed, found) is not None
    assert fastest_ways(menus, fixed, found - 1) is None


@given(_steps())
@settings(max_examples=30, deadline=None)
def test_less_room_never_gives_a_higher_peak(step: tuple[list[list[Way]], list[int]]) -> None:
    menus, fixed = step
    found = [one for room in range(90) if (one := fastest_ways(menus, fixed, room)) is not None]
    peaks = [peak_of_ways(menus, fixed, one) for one in found]
    assert peaks == sorted(peaks)


@given(_steps(), st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_with_few_states_what_fits_is_still_found(step: tuple[list[list[Way]], list[int]], room: int) -> None:
    menus, fixed = step
    before = shared_choices._MOST_STATES, shared_choices._MOST_WITH_SUMS
    shared_choices._MOST_STATES, shared_choices._MOST_WITH_SUMS = 3, 3
    try:
        found = fastest_ways(menus, fixed, room)
    finally:
        shared_choices._MOST_STATES, shared_choices._MOST_WITH_SUMS = before
    if found is not None:
        assert peak_of_ways(menus, fixed, found) <= room


def test_a_long_chain_is_filled_up_to_its_budget() -> None:
    """Twenty parts that run once hold what they save until their backward."""
    count = 20
    moments = 4 * count
    menus = []
    for part in range(count):
        ways = []
        for held in range(20):
            row = [0] * moments
            for at in range(part + 1, moments - part - 1):
                row[at] = held * 10 + part % 7
            row[part] = row[moments - part - 1] = 300 - held
            ways.append(Way(float(20 - held), tuple(row)))
        menus.append(ways)
    fixed = [0] * moments
    least = peak_of_ways(menus, fixed, least_peak_of_ways(menus, fixed))
    most = peak_of_ways(menus, fixed, (19,) * count)
    chosen = fastest_ways(menus, fixed, (least + most) // 2)
    assert chosen is not None
    sizes = bytes_of_ways(menus, fixed, chosen)
    assert max(sizes) <= (least + most) // 2 < max(sizes) + 20
