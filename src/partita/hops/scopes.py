"""Grad and inference modes for bodies that may be running under a tracer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from partita._torch.tracing_state import Tracing

__all__ = ["grad_scope", "standing_for_inference", "stands_for_inference", "traced_inference_scope"]

#: Whether a traced body stands for one that runs in inference mode.
_STANDS_FOR_INFERENCE: ContextVar[bool] = ContextVar("stands_for_inference", default=False)


def grad_scope(enabled: bool, *, tracing: Tracing) -> AbstractContextManager[Any]:  # noqa: FBT001
    """Gradients on or off; but inference mode, and an export that lowers a program without them, go on without.

    AOTAutograd in torch 2.13 raises an IndexError where such an export switches gradients on.
    """
    is_lowered_without = tracing is Tracing.OPEN and torch.compiler.is_exporting() and not torch.is_grad_enabled()
    if enabled and (is_lowered_without or stands_for_inference()):
        return nullcontext()
    # `set_grad_enabled` would switch the mode when it is made; these do when they are entered.
    return torch.enable_grad() if enabled else torch.no_grad()


@contextmanager
def traced_inference_scope(mode: bool, *, tracing: Tracing) -> Iterator[None]:  # noqa: FBT001
    """Inference mode as a tracer can follow it: without gradients, since inference tensors cannot be traced."""
    with standing_for_inference(mode), grad_scope(not mode, tracing=tracing):
        yield


@contextmanager
def standing_for_inference(mode: bool) -> Iterator[None]:  # noqa: FBT001
    """Inside, gradients cannot be switched on if `mode` is True: in inference mode that would have no effect."""
    token = _STANDS_FOR_INFERENCE.set(mode)
    try:
        yield
    finally:
        _STANDS_FOR_INFERENCE.reset(token)


def stands_for_inference() -> bool:
    """Whether what is traced now would run in inference mode."""
    return _STANDS_FOR_INFERENCE.get()
