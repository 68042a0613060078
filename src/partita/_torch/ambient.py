"""Ambient modes: grad, inference and autocast as a call finds them, and putting them back after an error."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import cache
from types import TracebackType

import torch

__all__ = ["Ambient", "can_autocast", "read_ambient", "restore_after_error", "restore_autocast"]

#: Taken once: while a model is captured, other things stand in these places.
_GUARD = torch._C._InferenceMode
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled
_is_autocast_cache_enabled = torch.is_autocast_cache_enabled
_is_inference_mode_enabled = torch.is_inference_mode_enabled
_get_autocast_dtype = torch.get_autocast_dtype

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "maia", "privateuseone")


@dataclass(frozen=True, slots=True)
class Ambient:
    """The modes of this thread at one moment."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    autocast_depth: int


def read_ambient() -> Ambient:
    """The modes that the next operator would run under."""
    return Ambient(
        grad=_is_grad_enabled(),
        inference=_is_inference_mode_enabled(),
        autocast=tuple(
            (device, _is_autocast_enabled(device), _get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES
        ),
        autocast_cache=_is_autocast_cache_enabled(),
        autocast_depth=_autocast_depth(),
    )


@cache
def can_autocast(device_type: str) -> bool:
    """Whether torch has autocast for a type of devices."""
    try:
        return torch.amp.is_autocast_available(device_type)
    except RuntimeError:  # It is no type of devices at all.
        return False


def restore_autocast(found: Ambient) -> None:
    """Puts back the autocast state of every device, the cache flag and the depth of nesting."""
    for device, enabled, dtype in found.autocast:
        if (_is_autocast_enabled(device), _get_autocast_dtype(device)) != (enabled, dtype):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(found.autocast_cache)
    depth = _autocast_depth()
    for _ in range(depth - found.autocast_depth):
        torch.autocast_decrement_nesting()
    for _ in range(found.autocast_depth - depth):
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


def restore_after_error(found: Ambient, error: BaseException) -> None:
    """Puts back the modes in `found` after `error` has left a graph with its own still set."""
    if error.__traceback__ is not None and _holds_guard(error.__traceback__.tb_next):
        # The guard of an inference block lives in the frame that raised; it restores all modes when it goes.
        traceback.clear_frames(error.__traceback__.tb_next)
    torch.set_grad_enabled(found.grad)
    restore_autocast(found)


def _holds_guard(raised: TracebackType | None) -> bool:
    """Whether a frame that an exception came through has an inference block open."""
    values = (value for frame, _ in traceback.walk_tb(raised) for value in frame.f_locals.values())
    return any(isinstance(value, _GUARD) for value in values)


def _autocast_depth() -> int:
    """How many autocast blocks are open; torch tells only when it counts."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
