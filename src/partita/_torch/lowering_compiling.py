"""The surroundings in which a compiler runs: those of the call, without what would confuse a trace, and put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes

from partita._torch.ambient import read_ambient, restore_after_error
from partita._torch.idle_dropout import IdleDropout

__all__ = ["compiler_scope", "run_on_fakes"]


@contextmanager
def compiler_scope() -> Iterator[None]:
    """Inside, inference mode is no_grad, since inference tensors cannot be traced; random states stay as they are."""
    found = read_ambient()
    hooks = torch._C._autograd
    # Hooks on saved tensors are the user's: they expect tensors with data.
    traced = hooks._saved_tensors_hooks_set_tracing(True)
    try:
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.random.fork_rng(devices=_devices()))
            stack.enter_context(IdleDropout())
            if found.inference:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            yield
    except BaseException as error:
        restore_after_error(found, error)
        raise
    finally:
        hooks._saved_tensors_hooks_set_tracing(traced)


def run_on_fakes(body: GraphModule, inputs: Sequence[Any], mode: Any) -> dict[Node, Any]:
    """What each node of `body` gives for fake inputs."""
    from torch._guards import TracingContext, tracing

    # Python's versions of operators are left out: they copy where plain torch gives the same tensor back.
    with tracing(TracingContext(mode)), mode.shape_env.ignore_fresh_unbacked_symbols(), mode:
        interpreter = Interpreter(body, garbage_collect_values=False)
        interpreter.run(*inputs)
    return interpreter.env


def _devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
