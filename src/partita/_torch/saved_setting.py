"""Where a program is run to see what autograd saves: apart from the modes, hooks and random numbers of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from partita._torch.capture_fresh_modes import fresh_modes
from partita._torch.stage import _quiet

__all__ = ["apart_from_the_caller", "saving_into"]


@contextmanager
def apart_from_the_caller(*, grad: bool) -> Iterator[None]:
    """Inside, no tracer is at work, autocast and inference mode are off, and gradients are as asked."""
    with ExitStack() as stack:
        stack.enter_context(_quiet("torch._subclasses.fake_tensor"))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(fresh_modes(grad=grad))
        yield


@contextmanager
def saving_into(pack: Callable[[Tensor], object]) -> Iterator[None]:
    """Inside, autograd hands what it saves to `pack`, and holds what that gives instead; no backward can follow."""
    autograd: Any = torch._C._autograd
    traced = autograd._saved_tensors_hooks_set_tracing(False)  # A tracer around us may have switched hooks off.
    try:
        with saved_tensors_hooks(pack, _never):
            yield
    finally:
        autograd._saved_tensors_hooks_set_tracing(traced)


def _never(packed: object) -> Tensor:
    raise AssertionError(f"a run without data has no backward: {packed!r}")
