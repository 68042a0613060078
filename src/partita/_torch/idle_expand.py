"""Expanding that repeats nothing, while a body is traced: a view like any other.

Functionalization (torch 2.13) takes a write through an expanded tensor back to `x + (written - x)`, which rounds, and
makes 0.0 of -0.0. Plain torch lets nobody write where an element was in fact repeated, so only idle ones matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["IdleExpand"]


class IdleExpand(TorchFunctionMode):
    """Gives a plain view for an expanded tensor that has no more elements than its input."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EXPANDING and args and isinstance(args[0], Tensor) and _repeats_nothing(args[0], result):
            return args[0].view(result.shape)
        return result


def _repeats_nothing(given: Tensor, expanded: Tensor) -> bool:
    """Whether all that was added are axes of one element; nothing is asked of symbols."""
    added = expanded.ndim - given.ndim
    new, old = expanded.shape[:added], expanded.shape[added:]
    return all(type(size) is int and size == 1 for size in new) and all(map(_is_known_equal, given.shape, old))


def _is_known_equal(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return type(one) is int and type(other) is int and one == other


_EXPANDING = frozenset(
    (
        Tensor.broadcast_to,
        Tensor.expand,
        Tensor.expand_as,
        torch.broadcast_to,
        torch.ops.aten.broadcast_to.default,
        torch.ops.aten.expand.default,
        torch.ops.aten.expand_as.default,
    )
)
