"""A stage: single nodes are tried on fake tensors, under modes set for the occasion; nothing of it stays behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import RLock, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partita._torch.capture_fresh_modes import fresh_modes
from partita._torch.dynamo_fakes import runs_fake

__all__ = ["Look", "Stage", "fake_mode_of", "map_leaves", "map_tensors", "tensors_in"]

#: Stages of one trace share its fake mode, which is for one thread at a time.
_LOCK = RLock()


class Look(NamedTuple):
    """What a tensor looks like from outside."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Look:
        stride = tuple(tensor.stride()) if tensor.layout is torch.strided else ()
        return cls(tuple(tensor.size()), stride, tensor.dtype, tensor.device)


class Stage:
    """Fake tensors that look like traced values, in the fake mode that those belong to."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._mode = _mode_of_trace(values)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, operators compute metadata only, gradients are on, autocast and inference mode are off."""
        with ExitStack() as stack:
            stack.enter_context(_LOCK)
            stack.enter_context(_quiet("torch._subclasses.fake_tensor"))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(fresh_modes(grad=True))
            stack.enter_context(_guards_ignored(self._mode))
            stack.enter_context(runs_fake(self._mode))
            yield

    def copy(self, value: Any, *, requires_grad: bool = False) -> Any:
        """A value with new fake tensors in place of its tensors."""
        return map_tensors(lambda tensor: self.like(tensor).requires_grad_(requires_grad), value)

    def like(self, tensor: Tensor) -> Tensor:
        """A new fake tensor that looks like `tensor`."""
        if tensor.layout is not torch.strided:
            with self._mode, torch.no_grad():
                return self._mode.from_tensor(tensor, static_shapes=True).detach()  # type: ignore[no-any-return]
        return self.made(Look.of(tensor))

    def alias(self, tensor: Tensor) -> Tensor:
        """A fake tensor in the same storage as a traced value."""
        mode = fake_mode_of(tensor)
        if mode is None:
            return self.like(tensor)
        with mode, torch.no_grad():
            return tensor.detach()

    def made(self, look: Look) -> Tensor:
        """A new fake tensor that looks so."""
        with self._mode:
            return torch.empty_strided(look.size, look.stride, dtype=look.dtype, device=look.device)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """A value with `change(tensor)` in place of each of its tensors."""
    return pytree.tree_map_only(Tensor, change, value)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """A value with `change(leaf)` in place of everything in it that is no container."""
    return pytree.tree_map(change, value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def fake_mode_of(tensor: Tensor) -> Any:
    """The mode that a fake tensor belongs to; None for a real one."""
    # Only fake tensors have the attribute; to import their class takes a while, and means that there are some.
    return getattr(tensor, "fake_mode", None)


def _mode_of_trace(values: Iterable[Any]) -> Any:
    """The fake mode of a trace: that of a symbolic tensor if there is one, since only that knows the symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    modes = []
    for tensor in (tensor for value in values for tensor in tensors_in(value)):
        mode = fake_mode_of(tensor)
        if mode is not None and tensor._has_symbolic_sizes_strides:
            return mode
        modes.append(mode)
    return next((mode for mode in modes if mode is not None), None) or FakeTensorMode()


def _guards_ignored(mode: Any) -> AbstractContextManager[Any]:
    """The trace is over: what was asked about its sizes then was asked for good."""
    env = mode.shape_env
    return nullcontext() if env is None else env.suppress_guards()


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """An operator that fails on fake tensors is an answer here, and no error; what other threads log is heard."""
    log, thread = logging.getLogger(logger), get_ident()

    def is_heard(_: logging.LogRecord) -> bool:
        return get_ident() != thread

    log.addFilter(is_heard)
    try:
        yield
    finally:
        log.removeFilter(is_heard)
