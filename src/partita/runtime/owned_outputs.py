"""Owned outputs: tensors that a body makes itself stay apart from its inputs and from each other when it is compiled.

Inductor (torch 2.13) returns `x` itself for `torch.zeros(4) + x`, and one tensor twice for two equal expressions. In
one graph that shows only at the end; between regions, a write to one of them would change the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partita._torch.lowering_gradients import is_locked_view
from partita._torch.schemas import storage_key

__all__ = ["copy_of", "memory_of", "owned_places", "places_to_copy"]


def owned_places(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[int, ...]:
    """The places of outputs that share memory with no input and no other output."""
    holders = Counter(map(memory_of, (*inputs, *outputs)))
    return tuple(
        place for place, value in enumerate(outputs) if isinstance(value, Tensor) and holders[memory_of(value)] == 1
    )


def places_to_copy(inputs: Sequence[Any], outputs: Sequence[Any], owned: Sequence[int]) -> tuple[int, ...]:
    """The places among `owned` of outputs that share memory all the same.

    So does a view that was made inside of a compiled function, and autograd lets nobody write to one.
    """
    holders = Counter(map(memory_of, (*inputs, *outputs)))
    return tuple(place for place in owned if holders[memory_of(outputs[place])] > 1 or is_locked_view(outputs[place]))


def copy_of(value: Tensor) -> Tensor:
    """A copy with the same strides, through which gradients flow."""
    copied = value.clone()
    if copied.stride() == value.stride():
        return copied
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def memory_of(value: Any) -> object:
    """What two values have in common if they share memory."""
    return storage_key(value) if isinstance(value, Tensor) else object()
