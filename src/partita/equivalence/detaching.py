"""Detaching: a tensor that a call wrote is cut off the graph of that call, and stays the same object."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor
from torch.utils import swap_tensors

from partita._torch.views import base_of

__all__ = ["detach_in_place"]


def detach_in_place(tensor: Tensor) -> None:
    """Cuts `tensor` off; a view as well, and what it is a view of, which `Tensor.detach_` refuses."""
    base = base_of(tensor)
    if base is None:
        tensor.detach_()
        return
    if base.grad_fn is not None:
        base.detach_()
    # A view that is made without gradients could not be written with gradients any more.
    with torch.enable_grad():
        fresh = base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    # Where somebody keeps the graph alive, the tensor stays in it: a backward pass through it raises in both programs.
    with suppress(RuntimeError):
        swap_tensors(tensor, fresh)
