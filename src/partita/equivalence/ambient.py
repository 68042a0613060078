"""Ambient modes: whatever a call leaves switched on is switched off again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from partita._torch.ambient import read_ambient, restore_autocast

__all__ = ["restored_ambient"]


@contextmanager
def restored_ambient() -> Iterator[None]:
    """Runs the block in the modes around it and puts those back afterwards."""
    found = read_ambient()
    # A weight that one run has cast and cached would carry that run's graph into the next.
    torch.clear_autocast_cache()
    try:
        # The guard behind inference_mode puts back the whole autograd state, a leaked inference mode included.
        with torch.inference_mode(found.inference), torch.set_grad_enabled(found.grad):
            yield
    finally:
        restore_autocast(found)
