"""Version counters: how often torch has written a tensor in place."""

from __future__ import annotations

from torch import Tensor

__all__ = ["version_of"]


def version_of(tensor: Tensor) -> int | None:
    """The number of writes so far; None for inference tensors, which do not count."""
    return None if tensor.is_inference() else tensor._version
