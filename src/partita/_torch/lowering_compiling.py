"""The surroundings in which a compiler runs: those of the call, without what would confuse a trace, and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from partita._torch.ambient import read_ambient, restore_after_error, restore_autocast
from partita._torch.idle_expand import IdleExpand
from partita._torch.traced_dropout import IdleDropout

__all__ = ["compiler_scope"]


@contextmanager
def compiler_scope() -> Iterator[None]:
    """Inside, inference mode is no_grad, since inference tensors cannot be traced; random states stay as they are.

    Modes and the default dtype are put back, whatever was done to them inside.
    """
    found, dtype = read_ambient(), torch.get_default_dtype()
    hooks = torch._C._autograd
    # Hooks on saved tensors are the user's: they expect tensors with data.
    traced = hooks._saved_tensors_hooks_set_tracing(True)
    try:
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.random.fork_rng(devices=_devices()))
            stack.enter_context(IdleDropout())
            stack.enter_context(IdleExpand())
            if found.inference:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            yield
        # A compiler may leave modes switched also where it succeeds.
        if read_ambient() != found:
            torch.set_grad_enabled(found.grad)
            restore_autocast(found)
    except BaseException as error:
        restore_after_error(found, error)
        raise
    finally:
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        hooks._saved_tensors_hooks_set_tracing(traced)


def _devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
