"""Where to cut a sequence into pieces of bounded length, so that least crosses the cuts."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def narrow_cuts(crossing: Sequence[int], *, least: int, most: int) -> list[int]:
    """The places of the cuts, in order; a cut at `place` is before item `place` and costs `crossing[place - 1]`.

    Pieces have `least` to `most` items where that is possible, and the sum over the cuts is least; of equal ones the
    fewest cuts.
    """
    count = len(crossing) + 1
    best: list[tuple[float, int]] = [(0.0, 0)] + [(inf, 0)] * count
    came_from = [0] * (count + 1)
    for stop in range(1, count + 1):
        for start in range(max(0, stop - most), stop - least + 1):
            sum_so_far, cuts = best[start]
            cost = crossing[start - 1] if start else 0
            found = (sum_so_far + cost, cuts + bool(start))
            if found < best[stop]:
                best[stop], came_from[stop] = found, start
    if best[count][0] == inf:  # No number of pieces has allowed lengths.
        return list(range(most, count, most))
    places, stop = [], count
    while (stop := came_from[stop]) > 0:
        places.append(stop)
    return places[::-1]
