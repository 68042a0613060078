"""The bytes of an optimizer's state, which is allocated throughout a training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from partita._torch.tensors import plain_tensors
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
        return sum(map(_bytes, made))
    return sum(
        _copies(optimizer, group) * _bytes(one)
        for group in optimizer.param_groups
        for one in group["params"]
        if one.requires_grad
    )


def bytes_to_come(optimizer: torch.optim.Optimizer | int) -> int:
    """The bytes of an optimizer's state without those that the allocator of a GPU counts already."""
    made = _made(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else []
    counted = sum(_bytes(value) for value in made if value.device.type == "cuda")
    return optimizer_bytes(optimizer) - counted


def _made(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """The bytes of a tensor in this process: of one that is sharded those of its shard."""
    return sum(one.numel() * one.element_size() for one in plain_tensors(tensor))


def _copies(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    """How many tensors of the size of a parameter an optimizer of torch keeps for each of a group."""
    name = type(optimizer).__name__
    if name not in _COPIES:
        raise OptionError(f"the size of the state of {name} is not known before its first step; pass it in bytes")
    always, options = _COPIES[name]
    return always + sum(bool(group.get(option)) for option in options)


#: By the name of the class: copies in any case, and the options of a group that each need one more.
_COPIES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "ASGD": (1, ()),
    "Adadelta": (2, ()),
    "Adagrad": (1, ()),
    "Adam": (2, ("amsgrad",)),
    "AdamW": (2, ("amsgrad",)),
    "Adamax": (2, ()),
    "NAdam": (2, ()),
    "RAdam": (2, ()),
    "RMSprop": (1, ("momentum", "centered")),
    "Rprop": (2, ()),
    "SGD": (0, ("momentum",)),
}
