"""The smallest part of something that still fails, found in few trials: halving, and delta debugging after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Whether these elements fail together.
Fails = Callable[[Sequence[int]], bool]


def smallest_failing(count: int, fails: Fails) -> list[int]:
    """A part of `range(count)` that fails, and no element of which can be removed; the whole is known to fail.

    If one element is to blame, it takes at most `ceil(log2(count)) + 1` trials.
    """
    known: dict[tuple[int, ...], bool] = {tuple(range(count)): True}

    def tried(part: Sequence[int]) -> bool:
        key = tuple(part)
        if key not in known:
            known[key] = bool(key) and fails(key)
        return known[key]

    alone = failing_element(count, tried)
    return _reduced(list(range(count)), tried) if alone is None else [alone]


def failing_element(count: int, fails: Fails) -> int | None:
    """One element of `range(count)` that fails by itself, found by halving; None if halving finds none."""
    suspects = list(range(count))
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        suspects = half if fails(half) else suspects[len(half) :]
    return suspects[0] if suspects and fails(suspects) else None


def _reduced(part: list[int], fails: Fails) -> list[int]:
    """Delta debugging: removes ever smaller chunks as long as the rest fails."""
    chunks = 2
    while len(part) > 1:
        size = -(-len(part) // chunks)
        starts = range(0, len(part), size)
        rests = ([*part[:start], *part[start + size :]] for start in starts)
        rest = next((rest for rest in rests if fails(rest)), None)
        if rest is not None:
            part, chunks = rest, max(chunks - 1, 2)
        elif size == 1:
            break
        else:
            chunks = min(2 * chunks, len(part))
    return part


def smallest_failing_run(count: int, fails: Callable[[int, int], bool]) -> tuple[int, int]:
    """The start and end of a short run in `range(count)` that fails: no shorter one of halving does.

    The whole is known to fail. It takes about `2 * log2(count)` trials.
    """
    low, end = 0, count  # The first `low` elements alone do not fail, the first `end` do.
    while end - low > 1:
        middle = (low + end) // 2
        if fails(0, middle):
            end = middle
        else:
            low = middle
    start, high = 0, end  # From `start` on it fails, from `high` on it does not.
    while high - start > 1:
        middle = (start + high) // 2
        if fails(middle, end):
            start = middle
        else:
            high = middle
    return start, end
