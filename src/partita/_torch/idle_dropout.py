"""Dropout that drops nothing, while a body is traced: it gives its input, as it does when it runs.

Functionalization (torch 2.13) takes the output of `torch.dropout(x, p, train=False)` for memory of its own, so that a
write to it would not reach `x`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["IdleDropout"]

#: The functions, and what their third argument is called.
_TRAINING = {
    functional.dropout: "training",
    torch.dropout: "train",
    torch.ops.aten.dropout: "train",
    torch.ops.aten.dropout.default: "train",
}


class IdleDropout(TorchFunctionMode):
    """Gives back the input of a dropout that is told not to train."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        flag = _TRAINING.get(func)
        if flag is not None:
            given = dict(zip(("input", "p", flag), args, strict=False)) | named
            if given.get(flag) is False and "input" in given:
                return given["input"]
        return func(*args, **named)
