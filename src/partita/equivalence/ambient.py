"""Ambient modes and settings: whatever a call leaves switched is switched back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from partita._torch.ambient import read_ambient, restore_autocast

__all__ = ["Settings", "read_settings", "restored_ambient"]


#: A module whose attributes are settings, which it has no types for.
_DETERMINISTIC: Any = torch.utils.deterministic


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """torch's settings for the whole process that a program may change."""

    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warns: bool
    matmul_precision: str
    default_device: torch.device
    fills_uninitialized_memory: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool

    def restore(self) -> None:
        """Puts them back where they were changed."""
        found = read_settings()
        if found.default_dtype is not self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if (found.deterministic, found.deterministic_warns) != (self.deterministic, self.deterministic_warns):
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warns)
        if found.matmul_precision != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        if found.default_device != self.default_device:
            # None is the CPU, without a mode that every factory function then goes through.
            torch.set_default_device(None if self.default_device == torch.device("cpu") else self.default_device)
        _DETERMINISTIC.fill_uninitialized_memory = self.fills_uninitialized_memory
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark


def read_settings() -> Settings:
    """The settings now."""
    return Settings(
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_device(),
        _DETERMINISTIC.fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )


@contextmanager
def restored_ambient() -> Iterator[None]:
    """Runs the block in the modes and settings around it and puts those back afterwards."""
    found, settings = read_ambient(), read_settings()
    # A weight that one run has cast and cached would carry that run's graph into the next.
    torch.clear_autocast_cache()
    try:
        # The guard behind inference_mode puts back the whole autograd state, a leaked inference mode included.
        with torch.inference_mode(found.inference), torch.set_grad_enabled(found.grad):
            yield
    finally:
        restore_autocast(found)
        settings.restore()
