"""Casts in a kept part: autocast remembers some, so that one run only has them; what it casts is cast again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor

from partita._torch.checkpoint_keep_entries import Cast, Entry
from partita._torch.schemas import storage_key

__all__ = ["AutocastCasts", "may_be_autocast", "was_remembered"]


@final
class AutocastCasts:
    """The casts of a part that autocast may have made, each for the operator that comes next.

    So the last operator of a part is kept. So is a cast of what the part writes to afterwards: it could not be made
    again from what is there in the end.
    """

    def __init__(self) -> None:
        #: By the storage that they read, with a way to make them.
        self._made: defaultdict[int, list[tuple[Entry, Callable[[], Tensor]]]] = defaultdict(list)
        self._last: Entry | None = None

    def note(self, entry: Entry, source: Tensor, make: Callable[[], Tensor]) -> None:
        """A cast of `source` has been made."""
        self._made[storage_key(source)].append((entry, make))
        self._last = entry

    def before_writes(self, written: Iterable[Tensor]) -> None:
        """Somebody is going to write."""
        for storage in {storage_key(tensor) for tensor in written}.intersection(self._made):
            for entry, make in self._made.pop(storage):
                entry.keep(make())
                self._last = None if entry is self._last else self._last

    def next_operator(self) -> None:
        """Another operator has run."""
        if self._last is not None:
            self._last.let_go()
            self._last = None


def may_be_autocast(cast: Cast | None) -> bool:
    """Whether autocast may have made a cast; whether it is switched on cannot be seen below autograd."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0 and cast is not None


def was_remembered(cast: Cast | None, entry: Entry | None) -> bool:
    """Whether a cast was not made in the first run, where `entry` was the next: autocast remembers those of leaves."""
    if cast is None:
        return False
    return entry is None or entry.cast is None or (cast is Cast.OF_LEAF and entry.cast is Cast.OF_RESULT)
