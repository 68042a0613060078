"""Views: what autograd remembers a tensor to be a part of."""

from __future__ import annotations

from torch import Tensor

__all__ = ["base_of"]


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that `tensor` is a view of; None if it is no view."""
    return tensor._base
