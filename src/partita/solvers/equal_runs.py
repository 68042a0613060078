"""Equal runs of a sequence of items: equal up to the names of what the items mention.

Every item has a letter, reads values and makes values. Two runs are equal if their letters are, and if what one item
reads is made, or was read before, at the same place of both; what a run does not make itself may be any value. Links
say this in numbers: each mention of a value knows how far away the last and the next one are, and a link that leaves
the run does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, count
from typing import final

#: Links up to this far take part in finding chunks: longer ones may lead out of a run.
_NEAR = 8

#: The places of two mentions differ by their items, in these steps, and by their slots.
_SLOT_BITS = 24
_HALF_A_STEP = 1 << (_SLOT_BITS - 1)


@final
@dataclass(frozen=True, slots=True)
class Items:
    """The items of a sequence: item `i` has a letter, reads values, and makes the value `i` and those in `makes[i]`.

    Values that no item makes have any other numbers. `returned` are read after the end. `depths` say how deep in the
    nest of calls the border before an item lies; of borders that the same number of values cross, the outer is taken.
    `work` is what each item costs to process, the same for equal letters; without it, 1.
    """

    letters: Sequence[int]
    reads: Sequence[Sequence[int]]
    makes: Mapping[int, Sequence[int]] = field(default_factory=dict)
    returned: Iterable[int] = ()
    depths: Sequence[int] = ()
    work: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.letters)


@final
class Links:
    """The links of all items, backward and forward, interned; and what follows from them."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self._before = _Codes(_links_back(items))
        self._after = _Codes(_links_ahead(items))

    def __len__(self) -> int:
        return len(self._items)

    @property
    def near(self) -> list[int]:
        """A number for each item, equal for equal letters with equal short links."""
        numbers: dict[Hashable, int] = {}
        cut = [numbers.setdefault(self._before.within(code, _NEAR), code) for code in range(len(self._before))]
        return [cut[code] for code in self._before.codes]

    def steps_right(self, starts: Sequence[int], length: int, most: int) -> int:
        """By how many items all runs can be extended to the right."""
        most = min(most, len(self) - starts[-1] - length)
        return _steps(self._before, most, length, lambda step: [start + length + step for start in starts])

    def steps_left(self, starts: Sequence[int], length: int, most: int) -> int:
        """By how many items all runs can be extended to the left."""
        most = min(most, starts[0])
        return _steps(self._after, most, length, lambda step: [start - 1 - step for start in starts])

    def agreeing(self, starts: Sequence[int], length: int, side: int) -> tuple[int, ...]:
        """The starts of the runs that can be extended by one item to a side, if they are about half of all."""
        codes, away = (self._before, length) if side > 0 else (self._after, -1)
        inside = [start for start in starts if 0 <= start + away < len(self)]
        letters = Counter([self._items.letters[start + away] for start in inside])
        if 2 * max(letters.values(), default=0) < len(starts):
            return ()
        found = [codes.within(codes.codes[start + away], length) for start in inside]
        most = Counter(found).most_common(1)
        return tuple(start for start, code in zip(inside, found, strict=True) if code == most[0][0]) if most else ()

    def key(self, start: int, length: int) -> Hashable:
        """Equal for equal runs."""
        codes, far, within = self._before.codes[start : start + length], self._before.far, self._before.within
        return tuple([within(code, at) if far[code] > at else code for at, code in enumerate(codes)])

    def read_later(self, start: int, length: int) -> Hashable:
        """Which values that a run makes are read after it."""
        stop, last, makes = start + length, self._last_reads, self._items.makes
        later = [at for at in range(start, stop) if last[at] >= stop]
        others = (
            (at - start, place)
            for at in range(start, stop)
            if at in makes
            for place, value in enumerate(makes[at])
            if self._other_last_reads.get(value, -1) >= stop
        )
        return tuple([at - start for at in later]), tuple(others) if makes else ()

    @cached_property
    def _last_reads(self) -> list[int]:
        last = [-1] * len(self)
        for value, at in self._every_last_read.items():
            if 0 <= value < len(last):
                last[value] = at
        return last

    @cached_property
    def _other_last_reads(self) -> dict[int, int]:
        made = {value for values in self._items.makes.values() for value in values}
        return {value: at for value, at in self._every_last_read.items() if value in made}

    @cached_property
    def _every_last_read(self) -> dict[int, int]:
        last = {value: at for at, reads in enumerate(self._items.reads) for value in reads}
        last.update(dict.fromkeys(self._items.returned, len(self)))
        return last

    @cached_property
    def border(self) -> list[int]:
        """What a cut before each item costs: how many values cross it, and then how deep it lies."""
        change = [0] * (len(self) + 2)
        last, others = self._last_reads, self._other_last_reads
        for at, read in enumerate(last):
            if read > at:
                change[at + 1] += 1
                change[read + 1] -= 1
        for at, values in self._items.makes.items():
            for value in values:
                if others.get(value, -1) > at:
                    change[at + 1] += 1
                    change[others[value] + 1] -= 1
        depths = self._items.depths or [0] * len(self)
        scale = max(depths, default=0) + 1
        crossing = list(accumulate(change))
        return [crossing[at] * scale + depth for at, depth in enumerate((*depths, 0))]


def _steps(codes: _Codes, most: int, length: int, places: Callable[[int], list[int]]) -> int:
    table, step = codes.codes, 0
    while step < most:
        found = {table[place] for place in places(step)}
        if len(found) > 1:
            one = codes.within(found.pop(), length + step)
            if any(codes.within(code, length + step) != one for code in found):
                break
        step += 1
    return step


@final
class _Codes:
    """A code for each item, equal for equal keys: the letter and the links of an item."""

    def __init__(self, keys: Iterable[tuple[int, ...]]) -> None:
        self._known: dict[tuple[int, ...], int] = {}
        self.codes = [self._known.setdefault(key, len(self._known)) for key in keys]
        self._keys = list(self._known)
        #: The longest link of each code.
        self.far = [max(map(_distance, key[1:]), default=0) for key in self._keys]

    def __len__(self) -> int:
        return len(self.far)

    def within(self, code: int, most: int) -> Hashable:
        """What a code says of links up to this long; codes that say the same give the same."""
        if self.far[code] <= most:
            return code
        letter, *links = self._keys[code]
        key = (letter, *(link if _distance(link) <= most else 0 for link in links))
        return self._known.get(key, key)


def _links_back(items: Items) -> Iterator[tuple[int, ...]]:
    """The letter of each item, and how far before it the values that it reads were mentioned last, or 0."""
    last: dict[int, int] = {}
    known, makes = last.get, items.makes
    for at, (letter, reads) in enumerate(zip(items.letters, items.reads, strict=True)):
        here, key = at << _SLOT_BITS, [letter]
        for value in reads:
            here += 1
            there = known(value)
            key.append(0 if there is None else here - there)
            last[value] = here
        yield tuple(key)
        last[at] = at << _SLOT_BITS
        if at in makes:
            last.update(zip(makes[at], count(here + 1)))


def _links_ahead(items: Items) -> list[tuple[int, ...]]:
    """The letter of each item, and how far after it the values that it reads or makes are mentioned next, or 0."""
    following: dict[int, int] = {}
    known, makes, keys = following.get, items.makes, list[tuple[int, ...]]()
    for at in range(len(items) - 1, -1, -1):
        place, reads = at << _SLOT_BITS, items.reads[at]
        here = place + len(reads)
        there = known(at)
        key = [items.letters[at], 0 if there is None else there - place]
        if at in makes:
            for slot, value in enumerate(makes[at], here + 1):
                there = known(value)
                key.append(0 if there is None else there - slot)
        for value in reversed(reads):
            there = known(value)
            key.append(0 if there is None else there - here)
            following[value] = here
            here -= 1
        keys.append(tuple(key))
    return keys[::-1]


def _distance(link: int) -> int:
    """By how many items a link leads away."""
    return (link + _HALF_A_STEP) >> _SLOT_BITS
