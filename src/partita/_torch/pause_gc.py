"""Pausing the garbage collector while many nodes are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """No cyclic collection inside: nodes refer to each other, so each run would visit all of them for nothing.

    What was made inside counts as old afterwards, or else the next run would visit all of it once more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() == 0:  # Freezing and unfreezing moves every object to the oldest generation.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
