"""The smallest failing part: right for any set of culprits, and in few trials for one."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.solvers.smallest_failing import smallest_failing, smallest_failing_run


@given(st.integers(1, 300), st.data())
def test_one_culprit_is_found_in_logarithmically_many_trials(count: int, data: st.DataObject) -> None:
    culprit, trials = data.draw(st.integers(0, count - 1)), []

    def fails(part: Sequence[int]) -> bool:
        trials.append(part)
        return culprit in part

    assert smallest_failing(count, fails) == [culprit]
    assert len(trials) <= (ceil(log2(count)) + 1 if count > 1 else 0)


@given(st.integers(2, 40), st.data())
def test_culprits_that_need_each_other_are_found_together(count: int, data: st.DataObject) -> None:
    together = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=4))
    assert smallest_failing(count, lambda part: together <= set(part)) == sorted(together)


@given(st.integers(2, 40), st.data())
def test_of_several_culprits_one_is_found(count: int, data: st.DataObject) -> None:
    culprits = data.draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=4))
    (found,) = smallest_failing(count, lambda part: bool(culprits & set(part)))
    assert found in culprits


@pytest.mark.parametrize("count", [1, 2, 3, 50, 64])
def test_the_shortest_run_that_holds_two_places(count: int) -> None:
    for first in range(count):
        for last in range(first, count):

            def fails(start: int, end: int, first: int = first, last: int = last) -> bool:
                return start <= first and last < end

            assert smallest_failing_run(count, fails) == (first, last + 1)
