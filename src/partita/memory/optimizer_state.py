"""The bytes of an optimizer's state, which is allocated throughout a training step."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.errors import OptionError


def optimizer_bytes(optimizer: torch.optim.Optimizer | int) -> int:
    """The bytes of an optimizer's state; before its first step, what one of torch's would make."""
    if isinstance(optimizer, bool) or not isinstance(optimizer, int | torch.optim.Optimizer):
        raise OptionError(f"`optimizer` is an optimizer, or the bytes of its state, not {optimizer!r}")
    if isinstance(optimizer, int):
        if optimizer < 0:
            raise OptionError(f"the state of an optimizer has {optimizer} bytes; pass a number from 0 on")
        return optimizer
    made = _made(optimizer)
    if made:
        return sum(value.numel() * value.element_size() for value in made)
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    parameter_bytes: int = sum(one.numel() * one.element_size() for one in parameters)
    return _copies(optimizer) * parameter_bytes


def bytes_to_come(optimizer: torch.optim.Optimizer | int) -> int:
    """The bytes of an optimizer's state without those that the allocator of a GPU counts already."""
    made = _made(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else []
    counted = sum(value.numel() * value.element_size() for value in made if value.device.type == "cuda")
    return optimizer_bytes(optimizer) - counted


def _made(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _copies(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors of the size of a parameter an optimizer of torch keeps for each."""
    copies = _COPIES.get(type(optimizer).__name__)
    if copies is None:
        raise OptionError(
            f"the size of the state of {type(optimizer).__name__} is not known before its first step; pass it in bytes"
        )
    group = optimizer.param_groups[0]
    if "momentum" in group and type(optimizer).__name__ == "SGD":
        return int(bool(group["momentum"]))
    return copies + bool(group.get("amsgrad"))


_COPIES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1, "RMSprop": 1, "SGD": 0, "Rprop": 2}
