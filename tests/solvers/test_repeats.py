"""Equal runs of a sequence: found wherever they are, told apart by what they mention, in N log N."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.selecting import slow_but
from tests.helpers.work import calls_during

from partita.solvers.equal_runs import Items
from partita.solvers.repeats import Run, cover, work_of

#: Values that no item makes.
OUTSIDE = 10**9


def _chain(text: str, **options: object) -> Items:
    """Items that each read the one before them."""
    reads = [(at - 1 if at else OUTSIDE,) for at in range(len(text))]
    return Items([ord(letter) for letter in text], reads, returned=(len(text) - 1,), **options)  # type: ignore[arg-type]


def _texts(text: str, runs: Sequence[Run]) -> list[str]:
    return [text[run.start : run.stop] for run in runs]


def _canonical(items: Items, run: Run) -> object:
    """A run with its values renamed in the order of their mention, and those that are read later."""
    local: dict[int, int] = {}
    body = []
    for at in range(run.start, run.stop):
        body.append((items.letters[at], *[local.setdefault(value, len(local)) for value in items.reads[at]]))
        local[at] = len(local)
    later = {value for reads in items.reads[run.stop :] for value in reads} | set(items.returned)
    return body, [local[at] for at in range(run.start, run.stop) if at in later]


def _check(items: Items, runs: Sequence[Run]) -> None:
    assert [run.start for run in runs] == [0, *(run.stop for run in runs)][: len(runs)]
    assert (runs[-1].stop if runs else 0) == len(items)
    bodies: dict[int, object] = {}
    for run in runs:
        if run.group >= 0:
            assert bodies.setdefault(run.group, _canonical(items, run)) == _canonical(items, run)
    assert all(count > 1 for group, count in Counter(run.group for run in runs).items() if group >= 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a", ["a"]),
        ("abcdef", ["abcdef"]),
        ("abcdef" * 5, ["abcdef"] * 5),
        ("xy" + "abcdef" * 5 + "z", ["xy", *["abcdef"] * 5, "z"]),
        # What repeats inside of a repeat is left to it.
        ("x" + "abcabcde" * 4 + "z", ["x", *["abcabcde"] * 4, "z"]),
        # Repeats that something else separates.
        ("abcdefghijkl1abcdefghijkl2abcdefghijkl3", ["abcdefghijkl", "1", "abcdefghijkl", "2", "abcdefghijkl", "3"]),
        # Two kinds of blocks that take turns.
        ("abcdefuvwxyz" * 3, ["abcdefuvwxyz"] * 3),
        # Two stacks.
        ("abcdef" * 4 + "uvwxyz" * 5, [*["abcdef"] * 4, *["uvwxyz"] * 5]),
    ],
)
def test_the_repeats_that_save_most_are_chosen(text: str, expected: list[str]) -> None:
    items = _chain(text)
    runs = cover(items, min_size=2)
    _check(items, runs)
    assert _texts(text, runs) == expected


def test_the_work_that_is_left_counts_bodies_once_and_calls_each() -> None:
    items = Items([1, 2, 1, 2, 3], [()] * 5)
    runs = [Run(0, 2, 0), Run(2, 4, 0), Run(4, 5, -1)]
    whole = [Run(0, 5, -1)]
    assert work_of(runs, items) == (2 + 1) + 2 * 2 + 3
    assert work_of(whole, items) == 5 + 2 + 1
    assert (
        work_of(runs, Items([1, 2, 1, 2, 3], [()] * 5, work=[10] * 5))
        < 50
        < work_of(whole, Items([1, 2, 1, 2, 3], [()] * 5, work=[10] * 5))
    )


def test_repeats_have_the_least_size() -> None:
    runs = cover(_chain("ab" * 12), min_size=5)
    assert [run.stop - run.start for run in runs] == [6] * 4


def test_runs_begin_where_the_fewest_values_cross() -> None:
    # Each block of "abcd" reads what it began with in its last item; the sequence starts and ends inside of a block.
    text = "cd" + "abcd" * 6 + "ab"
    reads: list[tuple[int, ...]] = []
    begin = OUTSIDE
    for at, letter in enumerate(text):
        begin = at - 1 if letter == "a" else begin
        reads.append((at - 1, begin) if letter == "d" else (at - 1 if at else OUTSIDE,))
    items = Items(list(map(ord, text)), reads, returned=(len(text) - 1,))
    assert "abcd" in _texts(text, cover(items, min_size=2))


def test_of_equal_borders_the_outer_one_is_taken() -> None:
    text = "cd" + "abcd" * 6 + "a"
    depths = [0 if letter == "b" else 1 for letter in text]
    assert "bcda" in _texts(text, cover(_chain(text, depths=depths), min_size=2))


def test_runs_with_other_wiring_differ() -> None:
    reads = []
    for at in range(40):
        # The third of the blocks of ten reads its first item twice.
        reads.append((at - 1, at - 5 if at == 27 else at - 1) if at % 10 == 7 else (at - 1 if at else OUTSIDE,))
    items = Items([at % 10 for at in range(40)], reads, returned=(39,))
    runs = cover(items, min_size=2)
    _check(items, runs)
    groups = [run.group for run in runs if run.stop - run.start == 10]
    assert len(groups) >= 3
    assert next(run for run in runs if run.start <= 27 < run.stop).group == -1


def test_a_value_that_all_runs_read_may_be_anywhere_before_them() -> None:
    # Item 1 is read by the fifth item of every block.
    letters = [100, 101, 102, *(at % 10 for at in range(60))]
    reads = [(at - 1, 1) if at > 2 and (at - 3) % 10 == 4 else (at - 1 if at else OUTSIDE,) for at in range(63)]
    runs = cover(Items(letters, reads, returned=(62,)), min_size=2)
    assert [run.stop - run.start for run in runs] == [3, *[10] * 6]


def test_a_run_whose_values_are_read_later_differs() -> None:
    letters = [at % 10 for at in range(60)]
    reads = [(at - 1 if at else OUTSIDE,) for at in range(60)]
    items = Items(letters, reads, returned=(59, 25))
    runs = cover(items, min_size=2)
    _check(items, runs)
    assert sum(run.group >= 0 for run in runs) == 5


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(1, 5)), max_size=40), st.integers(1, 4))
def test_groups_are_equal_and_cover_everything(steps: list[tuple[int, int, int]], copies: int) -> None:
    written = steps * copies
    reads = [(at - back, at - other) for at, (_, back, other) in enumerate(written)]
    items = Items([letter for letter, _, _ in written], reads, returned=(len(written) - 1,))
    _check(items, cover(items, min_size=1))


_STEPS = st.tuples(st.integers(0, 9), st.lists(st.integers(1, 6), min_size=1, max_size=3))


@given(st.lists(_STEPS, min_size=3, max_size=30), st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=2, max_size=8))
def test_blocks_are_found_wherever_they_are(body: list[tuple[int, list[int]]], gaps: list[int]) -> None:
    """Copies of a block behind other items: what is found is at least as good as these."""
    letters, reads, planted = [1000, 1001], [(OUTSIDE,), (0,)], list[Run]()
    for gap in gaps:
        for _ in range(gap):
            reads.append((len(letters) - 1,))
            letters.append(1000 + len(letters))
        begin = len(letters)
        # The first letter is in no block twice, so that no smaller block repeats instead.
        for letter, backs in ((99, [1]), *body):
            # What would be read from before the block is its input.
            reads.append(tuple(dict.fromkeys(max(len(letters) - back, begin - 1) for back in backs)))
            letters.append(letter)
        planted.append(Run(begin, len(letters), 0))
    items = Items(letters, reads, returned=(len(letters) - 1,))
    runs = cover(items, min_size=2)
    _check(items, runs)
    between = [Run(one.stop, other.start, -1) for one, other in pairwise(planted) if one.stop < other.start]
    assert _cost(runs) <= min(_cost([Run(0, 2 + gaps[0], -1), *planted, *between]), _cost([Run(0, len(items), -1)]))


def _cost(runs: Sequence[Run]) -> int:
    """The items of distinct bodies, one for each call and two for each body."""
    bodies = {at if run.group < 0 else -1 - run.group: run for at, run in enumerate(runs)}
    return sum(run.stop - run.start + 2 for run in bodies.values()) + len(runs)


@pytest.mark.parametrize("kind", slow_but(["blocks", "one letter", "no repeats", "random"], "blocks", "no repeats"))
def test_work_grows_in_proportion(kind: str) -> None:
    def items(size: int) -> Items:
        mixed = [(at * 0x9E3779B97F4A7C15 >> 20) % 1000003 for at in range(size)]
        letters = {
            "blocks": [at % 50 for at in range(size)],
            "one letter": [0] * size,
            "no repeats": list(range(size)),
            "random": [mix % 4 for mix in mixed],
        }[kind]
        reads = [(at - 1 - (mixed[at] % 20 if kind == "random" else 0), at - 1) for at in range(size)]
        return Items(letters, reads, returned=(size - 1,))

    small, large = items(4_000), items(32_000)
    once = calls_during(cover, small, min_size=2)
    # Eight times as much; N log N is 10 times.
    assert calls_during(cover, large, min_size=2) < 12 * once
