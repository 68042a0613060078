"""The modes that every thread starts with, in place of those that the caller has set."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

from partita._torch.ambient import Ambient, read_ambient, restore_autocast

__all__ = ["fresh_modes", "initial_modes", "would_autocast"]


@cache
def initial_modes() -> Ambient:
    """The modes of a thread in which nobody has switched any."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(read_ambient).result()


@contextmanager
def fresh_modes(*, grad: bool) -> Iterator[None]:
    """Inside, no inference mode and no autocast is on, and gradients are as asked; afterwards all is as it was."""
    found = read_ambient()
    with ExitStack() as stack:
        if found.inference:
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.callback(restore_autocast, found)
        restore_autocast(initial_modes())
        yield


@cache
def would_autocast(device: str, dtype: torch.dtype | None) -> bool:
    """Whether a block for this device and dtype casts here; torch switches one off that the machine cannot serve."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(torch.autocast(device, dtype)._enabled)
