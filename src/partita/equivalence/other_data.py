"""Other data: different values of the same kind, in the same memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partita._torch.wrapper_tensors import plain_tensors

__all__ = ["fill_with_other_data"]


def fill_with_other_data(leaves: Sequence[object]) -> None:
    """Writes other values into tensors that share one memory.

    Whole numbers only change places, since they may be indices; floats also shrink by a quarter and, unless none was
    negative, change sign, so that probabilities stay probabilities.
    """
    for leaf in leaves:
        inside = [tensor for tensor in plain_tensors(leaf) if _is_fillable(tensor)] if isinstance(leaf, Tensor) else []
        for tensor in inside:
            _fill(tensor.detach())
        if inside:
            # The others look at the same memory, which has been changed by now.
            return


def _is_fillable(tensor: Tensor) -> bool:
    special = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized
    return not special and tensor.numel() > 0


def _fill(tensor: Tensor) -> None:
    once = _unexpanded(tensor)
    try:
        once.copy_(_other_values(once))
    except RuntimeError:
        # Elements that overlap in memory cannot be written one by one; such an input keeps its values.
        return


def _unexpanded(tensor: Tensor) -> Tensor:
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _other_values(tensor: Tensor) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor if _looks_like_offsets(tensor) else tensor.flatten().roll(1).reshape(tensor.shape)
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8).flatten().roll(1).reshape(tensor.shape).view(tensor.dtype)
    sign = 1 if tensor.is_complex() or bool((tensor >= 0).all()) else -1
    return tensor.flatten().roll(1).reshape(tensor.shape) * (0.75 * sign)


def _looks_like_offsets(tensor: Tensor) -> bool:
    """Rising numbers in one row are often offsets, and kernels read wherever falling ones lead them."""
    return tensor.ndim == 1 and tensor.dtype is not torch.bool and bool((tensor.diff() >= 0).all())
