"""Fake tensors for a compiler backend: in the mode that Dynamo set up, with the symbolic sizes that it chose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher

from partita._torch.ambient import read_ambient, restore_after_error, restore_autocast

__all__ = ["ambient_kept", "forget_memos", "runs_fake", "shared_fake_mode", "to_fake"]


def shared_fake_mode(example_inputs: Sequence[Any]) -> Any:
    """The fake mode of the trace that is going on or of the inputs; a new one where there is neither."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    return detect_fake_mode(list(example_inputs)) or FakeTensorMode()


def to_fake(value: Any, mode: Any) -> Any:
    """A tensor as a fake one of `mode`; anything else as it is. One tensor always gives the same fake."""
    from torch._guards import TracingContext
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(value, torch.Tensor) or (isinstance(value, FakeTensor) and value.fake_mode is mode):
        return value
    context = TracingContext.try_get()
    symbolic = None if context is None else context.tensor_to_context.get(value)
    if symbolic is None:
        return mode.from_tensor(value, static_shapes=True)
    return mode.from_tensor(value, symbolic_context=symbolic, source=symbolic.tensor_source)


@contextmanager
def runs_fake(mode: Any, *, as_dynamo: bool = False) -> Iterator[None]:
    """Operators compute metadata only; real parameters among their arguments are read as fakes and never written.

    With `as_dynamo`, Python's versions of operators run, as they do under Dynamo: matmul in C++ fixes the sizes that it
    reads (torch 2.11). These copy where plain torch gives the same tensor back.
    """
    allowed, autograd = mode.allow_non_fake_inputs, torch._C._autograd
    # Hooks on saved tensors are the user's: they expect tensors with data.
    traced = autograd._saved_tensors_hooks_set_tracing(True)
    mode.allow_non_fake_inputs = True
    try:
        with _fresh_symbols_ignored(mode), enable_python_dispatcher() if as_dynamo else nullcontext(), mode:
            yield
    finally:
        mode.allow_non_fake_inputs = allowed
        autograd._saved_tensors_hooks_set_tracing(traced)


def forget_memos(mode: Any) -> None:
    """Lets a second run of the same nodes make new unbacked symbols, which then get the old names."""
    mode.epoch += 1


@contextmanager
def ambient_kept() -> Iterator[None]:
    """Puts back the modes that a graph leaves behind, since running it on fakes must change nothing."""
    ambient = read_ambient()
    try:
        yield
    except BaseException as error:
        restore_after_error(ambient, error)
        raise
    torch.set_grad_enabled(ambient.grad)
    restore_autocast(ambient)


def _fresh_symbols_ignored(mode: Any) -> AbstractContextManager[Any]:
    """The next tracer asks where every new unbacked symbol is bound; those of a fake run are bound nowhere."""
    env = mode.shape_env
    return nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()
