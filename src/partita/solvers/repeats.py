"""Repeats in a sequence: which runs of it occur several times, and which of them to choose.

A hierarchy of chunks finds where runs may be equal: a sequence is cut at local minima of hashed symbols, so that equal
runs are cut in the same way but for their ends, and the chunks are the symbols of the next level, which is at most half
as long. Chunks that occur several times are extended as far as they are equal.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import ceil
from operator import ge
from typing import NamedTuple, final

from partita.solvers.equal_runs import Items, Links

#: What a further call, and a further body, must save, in work.
_CALL, _BODY = 1, 2

#: How often the occurrences that do not go on are given up while a run is extended.
_ROUNDS = 8

#: Up to this many runs are merged in any number, more in multiples.
_FEW = 8

_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Run(NamedTuple):
    """Items from `start` up to `stop`; runs of one `group` are equal, and -1 is what lies between."""

    start: int
    stop: int
    group: int


def cover(items: Items, *, min_size: int, min_saved: float = 0) -> list[Run]:
    """Runs that cover all items, with the repeats that save most work if each group is processed once.

    A run of a group has at least `min_size` of work; groups that save less than `min_saved` are excluded.
    """
    if not len(items):
        return []
    cover = _Cover(items)
    for group, chosen in enumerate(_chosen(_Search(items, min_size).candidates(), cover, min_saved)):
        for start in chosen.starts:
            cover.group_at[start] = (start + chosen.length, group)
    return list(cover.runs())


def work_of(runs: Iterable[Run], items: Items) -> int:
    """The work that is left with these runs, calls and bodies included."""
    cover, known, left = _Cover(items), set[int](), 0
    for run in runs:
        left += _CALL
        if run.group < 0 or run.group not in known:
            left += _BODY + cover.work(run.start, run.stop)
        known.add(run.group)
    return left


@final
@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """Equal runs of one length that do not overlap, by their starts."""

    starts: tuple[int, ...]
    length: int

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Start, stop and number of the runs that follow one another without a gap."""
        begin, runs = self.starts[0], 1
        for one, other in pairwise(self.starts):
            if other == one + self.length:
                runs += 1
            else:
                yield begin, one + self.length, runs
                begin, runs = other, 1
        yield begin, self.starts[-1] + self.length, runs


# Which candidates to choose: greedily, by what they save in the cover so far.


@final
class _Cover:
    """What is covered by chosen runs."""

    def __init__(self, items: Items) -> None:
        self.size = len(items)
        self._before = [0, *accumulate(items.work or [1] * self.size)]
        self._taken = bytearray(self.size)
        self.group_at: dict[int, tuple[int, int]] = {}

    def free(self, candidate: _Candidate) -> _Candidate | None:
        """The runs of a candidate that overlap nothing that is taken; None for fewer than two."""
        taken, length = self._taken, candidate.length
        starts = tuple(start for start in candidate.starts if not any(taken[start : start + length]))
        if len(starts) == len(candidate.starts):
            return candidate
        return _Candidate(starts, length) if len(starts) > 1 else None

    def saved(self, candidate: _Candidate) -> int:
        """The work that is done once less, without what further calls and bodies cost."""
        taken, calls, bodies = self._taken, 0, 1
        for start, stop, runs in candidate.blocks():
            outer = (start > 0 and not taken[start - 1]) + (stop < self.size and not taken[stop])
            calls += runs - 1 + outer
            bodies += outer - 1
        return self.gain(candidate) - _CALL * calls - _BODY * bodies

    def work(self, start: int, stop: int) -> int:
        """The work of the items from `start` up to `stop`."""
        return self._before[stop] - self._before[start]

    def size_of(self, candidate: _Candidate) -> int:
        """The work of one run."""
        return self.work(candidate.starts[0], candidate.starts[0] + candidate.length)

    def gain(self, candidate: _Candidate) -> int:
        """The work of all runs but one."""
        return (len(candidate.starts) - 1) * self.size_of(candidate)

    def take(self, candidate: _Candidate) -> None:
        for start in candidate.starts:
            self._taken[start : start + candidate.length] = b"\1" * candidate.length

    def runs(self) -> Iterator[Run]:
        at = 0
        for start in sorted(self.group_at):
            if at < start:
                yield Run(at, start, -1)
            at, group = self.group_at[start]
            yield Run(start, at, group)
        if at < self.size:
            yield Run(at, self.size, -1)


def _chosen(candidates: Sequence[_Candidate], cover: _Cover, min_saved: float) -> Iterator[_Candidate]:
    """Takes the candidate that saves most until none saves anything; what it saves only falls as others are taken."""
    heap = [_entry(candidate, cover) for candidate in candidates]
    heapify(heap)
    while heap:
        entry = heappop(heap)
        candidate = cover.free(entry.candidate)
        if candidate is None:
            continue
        now = _entry(candidate, cover)
        if now.cost > -min_saved:
            continue
        if heap and now > heap[0]:
            heappush(heap, now)
            continue
        cover.take(candidate)
        yield candidate


class _Entry(NamedTuple):
    cost: int
    length: int
    start: int
    candidate: _Candidate


def _entry(candidate: _Candidate, cover: _Cover) -> _Entry:
    return _Entry(-cover.saved(candidate), -candidate.length, candidate.starts[0], candidate)


# Candidates: chunks that occur several times, extended.


@final
class _Search:
    """Finds equal runs."""

    def __init__(self, items: Items, min_size: int) -> None:
        self._items, self._min_size = items, min_size
        self._links, self._empty = Links(items), _Cover(items)
        self._found: list[_Candidate] = []
        #: For each item the place in `_found` of the candidate around it that saves most; a worthless one is first.
        self._around = [0] * len(items)
        self._ranks: list[tuple[int, int]] = []

    def candidates(self) -> list[_Candidate]:
        self._add(_Candidate((0,), 0), saved=0)
        for level in reversed(list(_levels(self._links.near))):
            for starts, length in level.repeated():
                rest = self._unknown(starts)
                if len(rest) < 2:
                    continue
                best = self._extended(rest, length)
                settled = list(self._settled(best))
                for candidate in settled:
                    self._add(candidate, saved=self._empty.gain(candidate))
                if not settled:
                    self._add(best, saved=0)
        return [candidate for candidate, rank in zip(self._found, self._ranks, strict=True) if rank[0]]

    def _add(self, candidate: _Candidate, *, saved: int) -> None:
        self._found.append(candidate)
        self._ranks.append((saved, len(candidate.starts)))
        self._note(len(self._found) - 1, candidate.starts)

    def _note(self, place: int, starts: Iterable[int]) -> None:
        """Notes runs of the candidate at `place` where no other saves more."""
        around, ranks, length = self._around, self._ranks, self._found[place].length
        for start in starts:
            others = set(around[start : start + length])
            if all(ranks[other] < ranks[place] for other in others):
                around[start : start + length] = [place] * length
            else:
                around[start : start + length] = [
                    max(place, other, key=ranks.__getitem__) for other in around[start : start + length]
                ]

    def _unknown(self, starts: Sequence[int]) -> Sequence[int]:
        """The starts that are worth a look: not those in a candidate with as many runs, or one that saves as much.

        Where only few are left, they are added to that candidate, if they fit.
        """
        gaps = sorted(self._empty.work(one, other) for one, other in pairwise(starts))
        # Few of the runs can be longer than the gaps between them.
        most = ceil(0.9 * len(starts) * gaps[len(gaps) // 4]), ceil(0.9 * len(starts))
        around, ranks = self._around, self._ranks
        known = {place for place in {around[start] for start in starts} if any(map(ge, ranks[place], most))}
        rest = [start for start in starts if around[start] not in known]
        if 4 * len(rest) > len(starts):
            return starts
        inside = next(start for start in starts if around[start] in known)
        return [start for start in rest if not self._adopted(start, inside)]

    def _adopted(self, start: int, inside: int) -> bool:
        """Adds the run around `start` that lies like the one around `inside` to its candidate, if it is equal."""
        place = self._around[inside]
        candidate = self._found[place]
        starts, length = candidate.starts, candidate.length
        first = starts[bisect_right(starts, inside) - 1]
        begin = start - (inside - first)
        at = bisect_left(starts, begin)
        near = starts[max(at - 1, 0) : at + 1]
        if not 0 <= begin <= len(self._items) - length or any(abs(other - begin) < length for other in near):
            return False
        if not self._ranks[place][0] or self._key(begin, length) != self._key(first, length):
            return False
        self._found[place] = _Candidate((*starts[:at], begin, *starts[at:]), length)
        self._ranks[place] = (self._empty.gain(self._found[place]), len(starts) + 1)
        self._note(place, [begin])
        return True

    def _key(self, start: int, length: int) -> Hashable:
        return self._links.key(start, length), self._links.read_later(start, length)

    def _extended(self, starts: Sequence[int], length: int) -> _Candidate:
        """The best of the runs around `starts`: as long as all of them are equal, or longer and fewer."""
        best = now = self._grown(_Candidate(tuple(starts), length))
        for _ in range(_ROUNDS):
            fewer = self._fewer(now)
            if fewer is None:
                break
            now = self._grown(fewer)
            if self._empty.gain(now) > self._empty.gain(best):
                best = now
        return best

    def _grown(self, candidate: _Candidate) -> _Candidate:
        starts, length = candidate.starts, candidate.length
        room = min((other - one for one, other in pairwise(starts)), default=length)
        right = self._links.steps_right(starts, length, room - length)
        left = self._links.steps_left(starts, length + right, room - length - right)
        return _Candidate(tuple(start - left for start in starts) if left else starts, length + right + left)

    def _fewer(self, candidate: _Candidate) -> _Candidate | None:
        """The runs that go on after the others do not; None where too few do."""
        starts, length = candidate.starts, candidate.length
        close = sum(other - one == length for one, other in pairwise(starts))
        if close:
            return _Candidate(tuple(_apart(starts, length + 1)), length) if 4 * close <= len(starts) else None
        kept = max((self._links.agreeing(starts, length, side) for side in (1, -1)), key=len)
        return _Candidate(kept, length) if 2 * len(kept) >= len(starts) and len(kept) > 1 else None

    def _settled(self, candidate: _Candidate) -> Iterator[_Candidate]:
        """The candidate where it is best cut, as many times as it fits, by exact equality; longer ones if small."""
        starts, length = candidate.starts, candidate.length
        if len(starts) * self._empty.size_of(candidate) < 2 * self._min_size or len(starts) < 2:
            return
        close = sum(other - one == length for one, other in pairwise(starts))
        if 4 * close < len(starts) and self._empty.saved(candidate) < 0:
            return
        if close:
            starts = self._aligned(self._with_neighbours(candidate))
        for equal in self._equal(starts, length):
            yield from self._large_enough(_Candidate(equal, length))

    def _aligned(self, candidate: _Candidate) -> tuple[int, ...]:
        """Starts of runs that follow one another: as many as fit, and then where the fewest values cross."""
        length, border = candidate.length, self._links.border
        spans = list(self._spans(candidate))
        best: tuple[int, int] | None = None
        starts: list[int] = []
        for phase in range(length):
            fitting = [
                range(low + (start + phase - low) % length, high - length + 1, length) for start, low, high in spans
            ]
            found = sum(map(len, fitting))
            if best is not None and found < -best[0]:
                continue
            costs = (sum(border[start] for start in runs) + border[runs[-1] + length] for runs in fitting if runs)
            cost = (-found, sum(costs))
            if best is None or cost < best:
                best, starts = cost, [start for runs in fitting for start in runs]
        return tuple(starts)

    def _spans(self, candidate: _Candidate) -> Iterator[tuple[int, int, int]]:
        """The start of each block of runs that follow one another, and from where to where it goes on like them."""
        length, links, low = candidate.length, self._links, 0
        blocks = list(candidate.blocks())
        model = next(start for start, _, runs in blocks if runs > 1)
        highs = [*(start for start, _, _ in blocks[1:]), len(links)]
        for (start, stop, runs), high in zip(blocks, highs, strict=True):
            # Items on the left are like those one run later, and those on the right like those one run earlier.
            later, last = (start + length, stop - 2 * length) if runs > 1 else (model + length, model)
            left = links.steps_left(sorted((start, later)), length, min(length, start - low))
            right = links.steps_right(sorted((last, stop - length)), length, min(length, high - stop))
            yield start, start - left, stop + right
            low = stop + right

    def _with_neighbours(self, candidate: _Candidate) -> _Candidate:
        """The candidate with the equal runs right before and right after blocks of runs."""
        length, links = candidate.length, self._links
        key, added, low = links.key(candidate.starts[0], length), list[int](), 0
        blocks = list(candidate.blocks())
        for (start, stop, _), high in zip(blocks, (*(start for start, _, _ in blocks[1:]), len(links)), strict=True):
            before, after = start - length, stop
            while before >= low and links.key(before, length) == key:
                added.append(before)
                before -= length
            while after + length <= high and links.key(after, length) == key:
                added.append(after)
                after += length
            low = after
        return _Candidate(tuple(sorted((*candidate.starts, *added))), length) if added else candidate

    def _equal(self, starts: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
        """The starts of two or more runs that are equal, with the values that are read after them."""
        groups: dict[Hashable, list[int]] = {}
        for start in starts:
            groups.setdefault(self._key(start, length), []).append(start)
        yield from (tuple(group) for group in groups.values() if len(group) > 1)

    def _large_enough(self, candidate: _Candidate) -> Iterator[_Candidate]:
        """The candidate; if its runs are too small, several of them as one, as often as that repeats."""
        factor = 1
        while candidate.length * factor <= len(self._items) // 2:
            merged = candidate if factor == 1 else _merged(candidate, factor)
            if merged is None:
                return
            if self._empty.size_of(merged) >= self._min_size and self._empty.saved(merged) >= 0:
                for starts in self._equal(merged.starts, merged.length) if factor > 1 else (merged.starts,):
                    yield _Candidate(starts, merged.length)
                return
            factor += 1 if factor < _FEW else factor


def _apart(starts: Sequence[int], gap: int) -> Iterator[int]:
    last = -gap
    for start in starts:
        if start >= last + gap:
            yield start
            last = start


def _merged(candidate: _Candidate, factor: int) -> _Candidate | None:
    step = candidate.length * factor
    starts = [
        at
        for start, stop, _ in candidate.blocks()
        for at in range(start, stop - step + 1, step)
        if stop - start >= step
    ]
    return _Candidate(tuple(starts), step) if len(starts) > 1 else None


# Levels: chunks of chunks.


@final
@dataclass(frozen=True, slots=True)
class _Level:
    """The symbols of one level, and where they start; equal symbols stand for equal items, but for long links."""

    symbols: Sequence[int]
    starts: Sequence[int]
    stop: int

    def repeated(self) -> Iterator[tuple[list[int], int]]:
        """The starts and the length of each symbol that occurs more than once."""
        places: dict[int, list[int]] = {}
        for at, symbol in enumerate(self.symbols):
            places.setdefault(symbol, []).append(at)
        for found in places.values():
            if len(found) > 1:
                first = found[0]
                yield [self.starts[at] for at in found], self.starts[first + 1] - self.starts[first]


def _levels(symbols: Sequence[int]) -> Iterator[_Level]:
    """Levels of chunks, the items first, until everything is one chunk."""
    level = _Level(symbols, range(len(symbols) + 1), len(symbols))
    while len(level.symbols) > 1:
        yield level
        level = _cut(_cut(level, _ends_of_runs(level.symbols)), None)


def _cut(level: _Level, borders: Sequence[int] | None) -> _Level:
    """The next level, cut before these symbols, or else at local minima of their hashes."""
    symbols = level.symbols
    if borders is None:
        mixed = [symbol * _MIX & _MASK for symbol in symbols]
        inner = range(1, len(symbols) - 1)
        borders = [0, *(at for at in inner if mixed[at - 1] > mixed[at] < mixed[at + 1])]
    known: dict[Hashable, int] = {}
    chunks = (tuple(symbols[start:stop]) for start, stop in pairwise((*borders, len(symbols))))
    numbers = [known.setdefault(chunk, len(known)) for chunk in chunks]
    return _Level(numbers, [*(level.starts[at] for at in borders), level.stop], level.stop)


def _ends_of_runs(symbols: Sequence[int]) -> list[int]:
    """Where a symbol differs from the one before it, so that a run of equal ones becomes one chunk."""
    return [0, *(at for at in range(1, len(symbols)) if symbols[at] != symbols[at - 1])]
