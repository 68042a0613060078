"""Writes in a kept part: memory that is kept has its last value anyway, of other memory there are copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from partita._torch.checkpoint_keep_entries import Entry, tensors_in
from partita._torch.schemas import storage_key

__all__ = ["WriteCopies"]


@final
class WriteCopies:
    """What the operators of a part have written, as it was when each had run.

    Of memory that is written again and again the last copy will do, unless somebody reads it in between.
    """

    def __init__(self) -> None:
        self._kept: set[int] = set()
        #: The entry and the place in it of the last copy, by the geometry of the tensor that was written.
        self._last: dict[tuple[object, ...], tuple[Entry, int]] = {}

    def of(self, written: Sequence[Tensor]) -> list[Tensor | None]:
        """Copies of what an operator has just written, None for memory that is kept."""
        return [None if storage_key(tensor) in self._kept else tensor.clone() for tensor in written]

    def note(self, entry: Entry, written: Sequence[Tensor]) -> None:
        """These copies are in the entry; older ones are not needed any more."""
        for place, tensor in enumerate(written):
            if entry.written[place] is None or tensor.layout is not torch.strided:
                continue
            key = (storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if key in self._last:
                older, its_place = self._last[key]
                older.written[its_place] = None
            self._last[key] = (entry, place)

    def note_kept(self, entry: Entry) -> None:
        """The results of the entry are kept, with whatever is written to them."""
        self._kept.update(map(storage_key, tensors_in(entry.result)))

    def note_reader(self) -> None:
        """An operator that will run again may read what was written."""
        self._last.clear()
