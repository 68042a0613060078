"""Fake copies of what a program is given and of what it owns, so that it can be run without memory and without a trace.

The copies have a fake mode of their own, and numbers where a trace has symbols. What shares memory still does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from partita._torch.symbolic import hint_of

__all__ = ["FakeCopies"]


class FakeCopies:
    """Copies in one fake `mode`; the same tensor, memory or module always gives the same copy."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # Without a fallback, which runs an operator on real memory of the same size.
        self.mode: Any = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True, shape_env=ShapeEnv())
        #: The tensors of modules, and their copies.
        self.owned: list[Tensor] = []
        self._storages: dict[int, Any] = {}
        # By identity; what is copied belongs to the program, which outlives this.
        self._tensors: dict[int, Tensor] = {}
        self._modules: dict[int, nn.Module] = {}

    def value(self, value: Any) -> Any:
        """A traced value with copies in place of its tensors, and numbers in place of its symbols."""
        return pytree.tree_map(lambda leaf: self.tensor(leaf) if isinstance(leaf, Tensor) else hint_of(leaf), value)

    def tensor(self, tensor: Tensor) -> Tensor:
        """A fake that looks like `tensor`, and needs gradients if that does."""
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
            raise NotImplementedError("a TorchScript module keeps its state out of reach")
        if isinstance(module, _LazyGraphModule):
            module.real_recompile()  # The code belongs to the class, which the copy shares.
        copied: nn.Module = object.__new__(type(module))
        self._modules[id(module)] = copied
        copied.__dict__.update(self.attributes(module))
        return copied

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        """Everything that `module` holds, its own parameters, buffers and children among it, copied."""
        plain = {name: self._held(value) for name, value in module.__dict__.items()}
        tables = {
            "_parameters": {name: self._held(value) for name, value in module._parameters.items()},
            "_buffers": {name: self._held(value) for name, value in module._buffers.items()},
            "_modules": {
                name: None if child is None else self.module(child) for name, child in module._modules.items()
            },
        }
        return {**plain, **tables}

    def _held(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if not isinstance(value, Tensor):
            return value
        copied = self.tensor(value)
        self.owned += (value, copied)
        return copied

    def _copy(self, tensor: Tensor) -> Tensor:
        from torch._subclasses.fake_tensor import FakeTensor

        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotImplementedError("it is given a tensor that is more than memory, sizes and strides")
        size, stride = ([hint_of(number) for number in numbers] for numbers in (tensor.shape, tensor.stride()))
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta.set_(self._storage(tensor), hint_of(tensor.storage_offset()), size, stride)
        fake: Tensor = FakeTensor(self.mode, meta, tensor.device)
        if not tensor.requires_grad:
            return fake
        if tensor.is_leaf:
            return fake.requires_grad_()
        with self.mode:  # Unlike a leaf, it may be written.
            return fake.copy_(torch.empty_like(fake).requires_grad_())

    def _storage(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            memory = torch.empty(hint_of(storage.nbytes()), dtype=torch.uint8, device="meta")
            known = self._storages[storage._cdata] = memory.untyped_storage()
        return known
