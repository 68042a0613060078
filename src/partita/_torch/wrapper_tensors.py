"""Tensors that wrap others, such as DTensor: their values and memory are those of the tensors inside."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["inner_tensors", "placements_of", "plain_tensors"]


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """The tensors that a wrapper holds, by attribute; none for other tensors, nested ones among them."""
    wrapper: Any = tensor
    if tensor.is_nested or not is_traceable_wrapper_subclass(tensor):
        return {}
    if hasattr(wrapper, "trigger_wait"):  # The result of a collective, which may not be there yet.
        wrapper.trigger_wait()
    names, _ = wrapper.__tensor_flatten__()
    held = {name: getattr(wrapper, name) for name in names}
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors in whose memory the values are: those inside a wrapper, at any depth, or the tensor itself."""
    inner = inner_tensors(tensor)
    return [plain for held in inner.values() for plain in plain_tensors(held)] if inner else [tensor]


def placements_of(tensor: Tensor) -> tuple[object, ...] | None:
    """How a DTensor is spread over which devices; None for other tensors."""
    mesh = getattr(tensor, "device_mesh", None)
    return None if mesh is None else (*getattr(tensor, "placements", ()), mesh)
