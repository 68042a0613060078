"""Which of several results to keep: the sets that no other set beats in both bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Item:
    """Something that can be kept: what it takes, and the time that it saves."""

    bytes: int
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class KeepSet:
    """Some of the items, by number."""

    bytes: int
    seconds: float
    items: tuple[int, ...]


def keep_sets(items: Sequence[Item], *, most: int) -> list[KeepSet]:
    """The undominated sets of items, from the smallest to the largest, the empty one among them; at most `most`.

    Bytes and seconds of a set are sums. If there are more than `most`, those stay that are best for their size (each
    adds the items that save most time for their bytes), and of the others an even choice.
    """
    sets = [KeepSet(0, 0.0, ())]
    # Free items come with every set.
    for number in sorted(range(len(items)), key=lambda number: (-_worth(items[number]), number)):
        item = items[number]
        if item.seconds <= 0:
            continue
        grown = (KeepSet(one.bytes + item.bytes, one.seconds + item.seconds, (*one.items, number)) for one in sets)
        sets = _undominated([*sets, *grown])
        if len(sets) > _MOST_SETS:
            sets = _chosen(sets, _MOST_SETS // 2)
    return [KeepSet(one.bytes, one.seconds, tuple(sorted(one.items))) for one in _chosen(sets, most)]


#: More sets than this are thinned out while they grow.
_MOST_SETS = 4_000


def _worth(item: Item) -> float:
    return item.seconds / item.bytes if item.bytes else float("inf")


def _undominated(sets: Sequence[KeepSet]) -> list[KeepSet]:
    kept: list[KeepSet] = []
    for one in sorted(sets, key=lambda one: (one.bytes, -one.seconds, one.items)):
        if not kept or one.seconds > kept[-1].seconds:
            kept.append(one)
    return kept


def _chosen(sets: Sequence[KeepSet], most: int) -> list[KeepSet]:
    """All sets on the concave hull, as far as these are few enough, and an even choice of the others."""
    if len(sets) <= most:
        return list(sets)
    hull = _hull(sets)
    if len(hull) > most:
        return _evenly(hull, most)
    taken = {one.items for one in hull}
    others = [one for one in sets if one.items not in taken]
    return sorted((*hull, *_evenly(others, most - len(hull))), key=lambda one: one.bytes)


def _hull(sets: Sequence[KeepSet]) -> list[KeepSet]:
    """The sets above every line between two others; `sets` grow in bytes and seconds."""
    hull: list[KeepSet] = []
    for one in sets:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], one):
            hull.pop()
        hull.append(one)
    return hull


def _slope(first: KeepSet, second: KeepSet) -> float:
    return (second.seconds - first.seconds) / (second.bytes - first.bytes)


def _evenly(sets: Sequence[KeepSet], most: int) -> list[KeepSet]:
    """The first, the last, and as many between as allowed."""
    if len(sets) <= most:
        return list(sets)
    if most < 2:
        return list(sets[:most])
    places = sorted({round(at * (len(sets) - 1) / (most - 1)) for at in range(most)})
    return [sets[place] for place in places]
