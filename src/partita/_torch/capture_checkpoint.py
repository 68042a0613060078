"""Checkpointed calls of a model that is being traced: plain calls, with the same values and gradients.

What a checkpoint saves and computes again is the business of whoever runs the graph. Traced as they are, reentrant
checkpoints hide their function from autograd, and selective ones put their own modes over the tracer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from typing import Any

from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.capture_recorder import listening_recorder
from partita._torch.capture_swaps import Swap

__all__ = ["checkpoint_swaps"]

_GENERATOR = "_checkpoint_without_reentrant_generator"


def checkpoint_swaps() -> list[Swap]:
    """The two ways in which `torch.utils.checkpoint` goes on, each with a plain call in its place."""
    generator, function = getattr(checkpoint, _GENERATOR), checkpoint.CheckpointFunction

    @wraps(generator)
    def around_call(fn: Any, preserve_rng_state: Any, context_fn: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
        if listening_recorder() is None:
            yield from generator(fn, preserve_rng_state, context_fn, *rest, **kwargs)
            return
        forward_context, _ = context_fn()
        # A mode that keeps chosen results for the backward has nothing to keep here.
        with nullcontext() if isinstance(forward_context, TorchDispatchMode) else forward_context:
            yield

    class PlainCheckpointFunction(function):  # type: ignore[misc, valid-type]
        @classmethod
        def apply(cls, run: Callable[..., Any], preserve: Any, *args: Any) -> Any:
            return function.apply(run, preserve, *args) if listening_recorder() is None else run(*args)

    return [
        Swap(checkpoint, _GENERATOR, around_call),
        Swap(checkpoint, "CheckpointFunction", PlainCheckpointFunction),
    ]
