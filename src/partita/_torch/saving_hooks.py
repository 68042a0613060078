"""The hooks by which autograd packs a tensor that it saves, and unpacks it: which are at work, and coming between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["around_hooks", "hooks_at_work"]

_Pack = Callable[[Tensor], Any]
_Unpack = Callable[[Any], Tensor]


def hooks_at_work() -> tuple[_Pack, _Unpack] | None:
    """What packs and unpacks the tensors that autograd saves now; None where it holds them itself."""
    found: tuple[_Pack, _Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def around_hooks(
    pack: Callable[[_Pack, Tensor], Any], unpack: Callable[[_Unpack, Any], Tensor] | None = None
) -> AbstractContextManager[Any]:
    """Inside, `pack` and `unpack` are called in the place of the hooks at work, and given these, if there are any."""
    hooks = hooks_at_work()
    if hooks is None:
        return nullcontext()
    return saved_tensors_hooks(partial(pack, hooks[0]), hooks[1] if unpack is None else partial(unpack, hooks[1]))
