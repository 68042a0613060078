"""The arguments that say which mode a body runs under, checked."""

from __future__ import annotations

from typing import Any

import torch

from partita.errors import OptionError

__all__ = ["check_autocast", "check_flag"]

_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "maia", "privateuseone")


def check_flag(name: str, value: Any) -> None:
    """Raises unless `value` is True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {value!r}")


def check_autocast(device_type: Any, dtype: Any, enabled: Any, cache_enabled: Any) -> None:
    """Raises unless torch.autocast can take these arguments."""
    if not isinstance(device_type, str) or not _is_known(device_type):
        known = ", ".join(filter(_is_known, _DEVICE_TYPES))
        raise OptionError(f"autocast knows no device type {device_type!r}; it knows {known}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise OptionError(f"dtype must be a torch.dtype, or None for the one set for {device_type!r}, not {dtype!r}")
    check_flag("enabled", enabled)
    if cache_enabled is not None:
        check_flag("cache_enabled", cache_enabled)


def _is_known(device_type: str) -> bool:
    try:
        return torch.amp.is_autocast_available(device_type)
    except RuntimeError:
        return False
