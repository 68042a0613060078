"""Autocast blocks of a model that is being traced: written with the arguments that the user gave.

The tracer switches the cache of cast weights off, and a block fills in what its user left open with the state that it
finds. Neither belongs in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.amp.autocast_mode import autocast
from torch.fx import Node

from partita._torch import toggles
from partita._torch.capture_recorder import Recorder
from partita._torch.capture_swaps import Swap
from partita._torch.capture_telling import Action, told

__all__ = ["autocast_block_swaps"]


def autocast_block_swaps() -> list[Swap]:
    """The methods of autocast, which tell the recorder."""
    blocks = _Blocks()
    return [
        told(autocast, "__init__", blocks.make),
        told(autocast, "__enter__", blocks.enter),
        told(autocast, "__exit__", blocks.leave),
    ]


@dataclass(frozen=True, slots=True)
class _Given:
    """The arguments of a block, and the dtype that the blocks around asked for where it was made."""

    dtype: torch.dtype | None
    enabled: bool
    cache: bool | None
    around: torch.dtype | None


class _Blocks:
    """The autocast blocks of one capture."""

    def __init__(self) -> None:
        self.given: WeakKeyDictionary[Any, _Given] = WeakKeyDictionary()
        self.open: WeakKeyDictionary[Any, tuple[Node | None, torch.dtype | None]] = WeakKeyDictionary()
        #: By device: the dtype that the open blocks ask for; None is that of the caller.
        self.dtypes: dict[str, torch.dtype | None] = {}

    def make(self, recorder: Recorder, original: Action, block: Any, *args: Any, **kwargs: Any) -> None:
        original(block, *args, **kwargs)
        named = signature(original).bind(block, *args, **kwargs)
        named.apply_defaults()
        _, device, dtype, enabled, cache = named.args
        self.given[block] = _Given(dtype, bool(enabled), cache, self.dtypes.get(_device_type(device)))

    def enter(self, recorder: Recorder, original: Action, block: Any) -> Any:
        with recorder.silence():
            entered = original(block)
        device = _device_type(block.device)
        before = self.dtypes.get(device)
        given = self.given.get(block)
        if given is None:  # It was made before the trace, and has kept what it found then.
            given = _Given(block.fast_dtype, block._enabled, block._cache_enabled, before)
        dtype = given.dtype
        if dtype is None and given.around != before:
            dtype = given.around
            if dtype is None:
                recorder.problems.append(
                    f"an autocast block on {device!r} takes its dtype from the caller, since it was made outside the "
                    f"block for {before} that it is entered in"
                )
        handle = recorder.write(toggles.ENTER_AUTOCAST, device, dtype, given.enabled, given.cache)
        if handle is not None:
            recorder.handles[block] = handle
        self.open[block] = (handle, before)
        recorder.open_autocasts[device] += 1
        self.dtypes[device] = before if dtype is None else dtype
        return entered

    def leave(self, recorder: Recorder, original: Action, block: Any, *raised: Any) -> Any:
        with recorder.silence():
            left = original(block, *raised)
        # A block that was entered again while it was open remembers only the last time: leaving it once more does
        # nothing, in torch as here.
        device = _device_type(block.device)
        handle, before = self.open.pop(block, (None, self.dtypes.get(device)))
        self.dtypes[device] = before
        if handle is not None:
            recorder.write(toggles.EXIT_AUTOCAST, handle)
            recorder.open_autocasts[device] -= 1
        return left


def _device_type(device: str) -> str:
    """The type of a device that a block is for: torch takes "cpu:0" as well."""
    return torch.device(device).type
