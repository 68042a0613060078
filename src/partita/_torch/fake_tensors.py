"""Fake tensors: copies of what a program holds, the fake mode of a trace, and runs in it without side effects."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from partita._torch.pytrees import map_leaves
from partita._torch.symbolic_shapes import hint_of

#: Dynamo does not trace the code of this module: it runs around bodies, after a graph break.
DYNAMO_SKIPS = True


# Fake copies of the inputs and the state of a program, so that it can run without memory and without side effects.
#
# The copies have a fake mode of their own, and numbers in place of symbols. Aliasing is preserved.


class FakeCopies:
    """Copies in one fake `mode`; each tensor, storage or module is copied once."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # Without a fallback, which runs an operator on real memory of the same size.
        self.mode: Any = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True, shape_env=ShapeEnv())
        #: The tensors of modules, and their copies.
        self.owned: list[Tensor] = []
        self._storages: dict[int, Any] = {}
        # By identity; the originals belong to the program, which outlives this.
        self._tensors: dict[int, Tensor] = {}
        self._modules: dict[int, nn.Module] = {}

    def value(self, value: Any) -> Any:
        """A traced value with copies in place of its tensors, and numbers in place of its symbols."""
        return map_leaves(lambda leaf: self.tensor(leaf) if isinstance(leaf, Tensor) else hint_of(leaf), value)

    def tensor(self, tensor: Tensor) -> Tensor:
        """A fake with the metadata of `tensor`, `requires_grad` included."""
        known = self._tensors.get(id(tensor))
        if known is None:
            known = self._tensors[id(tensor)] = self._copy(tensor)
        return known

    def module(self, module: nn.Module) -> nn.Module:
        """A module with the same code and the same attributes, but copies of all parameters, buffers and tensors."""
        known = self._modules.get(id(module))
        if known is not None:
            return known
        if isinstance(module, torch.jit.ScriptModule):
            raise NotImplementedError("the state of a TorchScript module cannot be copied")
        if isinstance(module, _LazyGraphModule):
            module.real_recompile()  # The code belongs to the class, which the copy shares.
        copied: nn.Module = object.__new__(type(module))
        self._modules[id(module)] = copied
        copied.__dict__.update(self.attributes(module))
        return copied

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        """Copies of all attributes of `module`, its parameters, buffers and children included."""
        plain = {name: self._copied_attribute(value) for name, value in module.__dict__.items()}
        tables = {
            "_parameters": {name: self._copied_attribute(value) for name, value in module._parameters.items()},
            "_buffers": {name: self._copied_attribute(value) for name, value in module._buffers.items()},
            "_modules": {
                name: None if child is None else self.module(child) for name, child in module._modules.items()
            },
        }
        return {**plain, **tables}

    def forget(self) -> None:
        """Drops its references to copies of tensors that no module owns, so that each is freed after its last use."""
        self._tensors.clear()
        self._storages.clear()

    def _copied_attribute(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if not isinstance(value, Tensor):
            return value
        copied = self.tensor(value)
        self.owned += (value, copied)
        return copied

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotImplementedError("a tensor is not strided, or is lazily conjugated or negated")
        size, stride = ([hint_of(number) for number in numbers] for numbers in (tensor.shape, tensor.stride()))
        # A fake mode (torch 2.13) keeps arguments of `set_` in its cache, so the storage would never be freed.
        with _disable_current_modes():
            meta = torch.empty(0, dtype=tensor.dtype, device="meta")
            meta.set_(self._storage(tensor), hint_of(tensor.storage_offset()), size, stride)
            fake: Tensor = self.mode.fake_tensor_converter.from_meta_and_device(self.mode, meta, tensor.device)
        if not tensor.requires_grad:
            return fake
        if tensor.is_leaf:
            return fake.requires_grad_()
        with self.mode:  # Unlike a leaf, it may be mutated.
            return fake.copy_(torch.empty_like(fake).requires_grad_())

    def _storage(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            memory = torch.empty(hint_of(storage.nbytes()), dtype=torch.uint8, device="meta")
            known = self._storages[storage._cdata] = memory.untyped_storage()
        return known


def fake_mode_of(value: Any) -> Any:
    """The mode that a fake tensor belongs to; None for any other value."""
    # Only fake tensors have the attribute; importing their class is slow.
    return getattr(value, "fake_mode", None) if isinstance(value, Tensor) else None


@contextmanager
def muted(logger: str) -> Iterator[None]:
    """Drops log records of this thread: an operator that fails on fake tensors is a valid result here."""
    log, thread = logging.getLogger(logger), get_ident()

    def is_of_other_thread(_: logging.LogRecord) -> bool:
        return get_ident() != thread

    log.addFilter(is_of_other_thread)
    try:
        yield
    finally:
        log.removeFilter(is_of_other_thread)


# Fake tensors for a compiler backend: in the mode that Dynamo set up, with the dynamic sizes that it chose.


def shared_fake_mode(example_inputs: Sequence[Any]) -> Any:
    """The fake mode of the active trace or of the inputs; a new one where there is neither."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    context = _tracing_context()
    of_trace = active_fake_mode() if context is None or context.fake_mode is None else context.fake_mode
    return of_trace or fake_mode_in(example_inputs) or FakeTensorMode()


def fake_mode_in(values: Iterable[Any]) -> Any:
    """The mode of the first fake among these values or inside wrappers among them; None if there is none."""
    for value in values:
        mode = fake_mode_of(value)
        if mode is None and isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            mode = fake_mode_in([getattr(value, name) for name in names])
        if mode is not None:
            return mode
    return None


def _tracing_context() -> Any:
    from torch._guards import TracingContext

    return TracingContext.try_get()


def to_fake(value: Any, mode: Any) -> Any:
    """A tensor as a fake one of `mode`; anything else as it is. Each tensor has one fake."""
    if not isinstance(value, torch.Tensor) or fake_mode_of(value) is mode:
        return value
    context = _tracing_context()
    symbolic = None if context is None else context.tensor_to_context.get(value)
    if symbolic is None:
        return mode.from_tensor(value, static_shapes=True)
    return mode.from_tensor(value, symbolic_context=symbolic, source=symbolic.tensor_source)


@contextmanager
def runs_fake(mode: Any, *, as_dynamo: bool = False) -> Iterator[None]:
    """Operators compute metadata only; real parameters among their arguments are treated as fakes and never mutated.

    With `as_dynamo`, Python's versions of operators run, as they do under Dynamo: matmul in C++ specializes the sizes
    that it reads (torch 2.11). These copy where plain torch returns the same tensor.
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
    """Lets a second run of the same nodes create new unbacked symbols, which then get the old names."""
    mode.epoch += 1


def _fresh_symbols_ignored(mode: Any) -> AbstractContextManager[Any]:
    """Drops new unbacked symbols: the next tracer would look for their bindings, and a fake run has none."""
    env = mode.shape_env
    return nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()


def active_fake_mode() -> Any:
    """The fake mode that operators are dispatched to; None if there is none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode)), None)
