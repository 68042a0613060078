"""Generated steps whose parts are called one or several times, small enough to try all of their choices."""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

from partita.solvers.prices import Way


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


STEPS = _steps()


def all_choices(menus: list[list[Way]]) -> list[tuple[int, ...]]:
    return list(product(*(range(len(menu)) for menu in menus)))
