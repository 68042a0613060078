"""Cuts at narrow places: the cheapest of all that give pieces of allowed lengths."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from partita.solvers.narrow_cuts import narrow_cuts


@given(st.lists(st.integers(0, 20), max_size=10), st.integers(1, 3), st.integers(3, 6))
@settings(max_examples=200, deadline=None)
def test_cuts_are_the_cheapest_of_all(crossing: list[int], least: int, most: int) -> None:
    count = len(crossing) + 1
    every = [
        places
        for size in range(count)
        for places in combinations(range(1, count), size)
        if all(least <= stop - start <= most for start, stop in pairwise([0, *places, count]))
    ]
    found = narrow_cuts(crossing, least=least, most=most)
    if not every:
        assert all(stop - start <= most for start, stop in pairwise([0, *found, count]))
        return
    assert tuple(found) in every
    assert sum(crossing[place - 1] for place in found) == min(
        sum(crossing[place - 1] for place in places) for places in every
    )
