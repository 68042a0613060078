"""A sandbox for dry runs: evaluates single nodes under fake tensors, in modes of its own, without side effects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.dry_runs import Allowance
from partita._torch.fake_tensors import fake_mode_of, muted, runs_fake
from partita._torch.modes import fresh_modes
from partita._torch.pytrees import map_tensors, tensors_in
from partita._torch.symbolic_shapes import has_symbolic_sizes

#: Sandboxes of one trace share its fake mode, which is for one thread at a time.
_LOCK = RLock()


class TensorMetadata(NamedTuple):
    """Size, stride, dtype and device of a tensor."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMetadata:
        stride = tuple(tensor.stride()) if tensor.layout is torch.strided else ()
        return cls(tuple(tensor.size()), stride, tensor.dtype, tensor.device)


class LimitedCalls(TorchDispatchMode):
    """Counts the operators that run inside against an `Allowance`."""

    supports_higher_order_operators = True

    def __init__(self, allowance: Allowance) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allowance = allowance

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._allowance.spend(func, args, kwargs)
        return func(*args, **kwargs)


class FakeSandbox:
    """Fake tensors with the metadata of traced values, in the fake mode that those belong to."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._mode = _mode_of_trace(values)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, operators compute metadata only, gradients are on, autocast and inference mode are off."""
        with ExitStack() as stack:
            stack.enter_context(_LOCK)
            stack.enter_context(muted("torch._subclasses.fake_tensor"))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(fresh_modes(grad=True))
            stack.enter_context(_guards_ignored(self._mode))
            stack.enter_context(runs_fake(self._mode))
            yield

    def copy(self, value: Any, *, requires_grad: bool = False) -> Any:
        """A value with new fake tensors in place of its tensors."""
        return map_tensors(lambda tensor: self.like(tensor).requires_grad_(requires_grad), value)

    def like(self, tensor: Tensor) -> Tensor:
        """A new fake tensor with the metadata of `tensor`."""
        if tensor.layout is not torch.strided:
            with self._mode, torch.no_grad():
                return self._mode.from_tensor(tensor, static_shapes=True).detach()  # type: ignore[no-any-return]
        return self.made(TensorMetadata.of(tensor))

    def alias(self, tensor: Tensor) -> Tensor:
        """A fake tensor in the same storage as a traced value."""
        mode = fake_mode_of(tensor)
        if mode is None:
            return self.like(tensor)
        with mode, torch.no_grad():
            return tensor.detach()

    def made(self, metadata: TensorMetadata) -> Tensor:
        """A new fake tensor with this metadata."""
        with self._mode:
            return torch.empty_strided(metadata.size, metadata.stride, dtype=metadata.dtype, device=metadata.device)


def _mode_of_trace(values: Iterable[Any]) -> Any:
    """The fake mode of a trace: that of a symbolic tensor if there is one, since only that knows the symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    modes = []
    for tensor in (tensor for value in values for tensor in tensors_in(value)):
        mode = fake_mode_of(tensor)
        if mode is not None and has_symbolic_sizes(tensor):
            return mode
        modes.append(mode)
    return next((mode for mode in modes if mode is not None), None) or FakeTensorMode()


def _guards_ignored(mode: Any) -> AbstractContextManager[Any]:
    """Adds no guards to the shape environment: the trace is over."""
    env = mode.shape_env
    return nullcontext() if env is None else env.suppress_guards()
