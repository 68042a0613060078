"""Pausing the garbage collector while many nodes are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: How many objects may be made in pauses before a full collection.
_MOST_UNSEEN = 1_000_000


class _Unseen:
    """How many objects were made in pauses since the last full collection, which was number `collections`."""

    count = 0
    collections = 0


@contextmanager
def gc_paused() -> Iterator[None]:
    """No cyclic collection inside: nodes refer to each other, so each run would visit all of them for nothing.

    What was made inside counts as old afterwards, or else the next run would visit all of it once more. Python never
    counts such objects towards its next full collection, so one is run when there are too many of them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _age_new_objects()
            gc.enable()


def _age_new_objects() -> None:
    if gc.get_freeze_count():  # The program keeps objects frozen, and unfreezing would unfreeze those as well.
        return
    made, collections = gc.get_count()[0], gc.get_stats()[-1]["collections"]
    if collections != _Unseen.collections:  # Another full collection has visited them.
        _Unseen.count, _Unseen.collections = 0, collections
    before, _Unseen.count = _Unseen.count, _Unseen.count + made
    if before > _MOST_UNSEEN:  # What was made just now is still in use, so it alone is no reason.
        _Unseen.count = 0
        gc.collect()
    else:  # Freezing and unfreezing moves every object to the oldest generation.
        gc.freeze()
        gc.unfreeze()
