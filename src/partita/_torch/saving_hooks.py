"""The hooks by which autograd packs a tensor that it saves, and unpacks it: which are at work, and coming between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from partita._torch.tracing_state import Tracing, tracing_now

__all__ = ["around_hooks", "but_for_traces", "hooks_at_work"]

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


def but_for_traces() -> AbstractContextManager[Any]:
    """Inside, the hooks at work see nothing of what an operator traces when it is called, as `scan` does (torch 2.13).

    It traces its body with its backward, and a checkpoint would run the whole region again in the midst of the trace.
    """
    return around_hooks(_pack_real, _unpack_real)


class _Traced:
    """A tensor without data that a trace saves."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _pack_real(pack: _Pack, tensor: Tensor) -> Any:
    return pack(tensor) if tracing_now() is Tracing.NOT else _Traced(tensor)


def _unpack_real(unpack: _Unpack, packed: Any) -> Tensor:
    return packed.tensor if isinstance(packed, _Traced) else unpack(packed)
