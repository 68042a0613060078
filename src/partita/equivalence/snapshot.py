"""Snapshots: state as it was, copied only where it may be written, and put back as often as needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, UntypedStorage
from torch.fx import GraphModule
from torch.nn import Module

from partita._torch.wrapper_tensors import inner_tensors, plain_tensors
from partita.equivalence.detaching import detach_in_place
from partita.equivalence.state import Slot
from partita.equivalence.storages import storage_key, storage_of

__all__ = ["Snapshot", "snapshot_of"]

_Container: TypeAlias = list[object] | dict[object, object]

_PLAIN = (type(None), bool, int, float, complex, str, Tensor, tuple, list, dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of the memory that may be written, and for all tensors and modules what else could change."""

    memory: tuple[tuple[UntypedStorage, UntypedStorage], ...]
    layouts: tuple[_Layout | _Wrapper, ...]
    attributes: tuple[_Attributes, ...]

    def restore(self) -> None:
        """Puts everything back as it was."""
        for attributes in self.attributes:
            attributes.restore()
        for layout in self.layouts:
            layout.restore()
        for storage, copy in self.memory:
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)


def snapshot_of(roots: Iterable[Module], slots: Iterable[Slot], *, written: frozenset[int]) -> Snapshot:
    """A snapshot of these modules that copies no other memory than what `written` names by storage key."""
    held = {id(slot.tensor): slot.tensor for slot in slots}.values()
    wrappers = [tensor for tensor in held if inner_tensors(tensor)]
    tensors = {id(plain): plain for tensor in held for plain in plain_tensors(tensor)}.values()
    memory: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        key, storage = storage_key(tensor), storage_of(tensor)
        if key is not None and storage is not None and key in written:
            memory.setdefault(key, storage)
    modules = {id(module): module for root in roots for module in root.modules()}.values()
    return Snapshot(
        memory=tuple((storage, storage.clone()) for storage in memory.values()),
        layouts=(*map(_wrapper_of, wrappers), *map(_layout_of, tensors)),
        # A graph writes tensors, never attributes; what changes in its module is code that is made when first needed.
        attributes=tuple(_attributes_of(module) for module in modules if not isinstance(module, GraphModule)),
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    tensor: Tensor
    storage: UntypedStorage
    place: tuple[int, torch.Size, tuple[int, ...]]
    requires_grad: bool
    in_graph: bool

    def restore(self) -> None:
        tensor = self.tensor
        if self.in_graph:
            return
        with torch.no_grad():
            if tensor.grad_fn is not None:
                detach_in_place(tensor)
            if _place_of(tensor) != self.place or tensor.untyped_storage().data_ptr() != self.storage.data_ptr():
                tensor.set_(self.storage, *self.place)
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """A tensor that wraps others, which have layouts of their own."""

    tensor: Tensor
    inner: dict[str, Tensor]
    requires_grad: bool
    in_graph: bool

    def restore(self) -> None:
        tensor = self.tensor
        if self.in_graph:
            return
        if tensor.grad_fn is not None:
            detach_in_place(tensor)
        for name, inner in self.inner.items():
            if getattr(tensor, name) is not inner:
                setattr(tensor, name, inner)
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)


def _wrapper_of(tensor: Tensor) -> _Wrapper:
    return _Wrapper(tensor, inner_tensors(tensor), tensor.requires_grad, tensor.grad_fn is not None)


def _layout_of(tensor: Tensor) -> _Layout:
    in_graph = tensor.grad_fn is not None
    return _Layout(tensor, tensor.untyped_storage(), _place_of(tensor), tensor.requires_grad, in_graph)


def _place_of(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return int(tensor.storage_offset()), tensor.size(), tensor.stride()


@dataclass(frozen=True, slots=True)
class _Attributes:
    module: Module
    values: dict[str, object]
    contents: tuple[tuple[_Container, _Container], ...]

    def restore(self) -> None:
        table = vars(self.module)
        for name, value in list(table.items()):
            if name not in self.values and isinstance(value, _PLAIN):
                del table[name]
        table.update({name: value for name, value in self.values.items() if isinstance(value, _PLAIN)})
        for container, content in self.contents:
            _refill(container, content)


def _attributes_of(module: Module) -> _Attributes:
    values = dict(vars(module))
    containers = [value for value in values.values() if type(value) in (list, dict, OrderedDict)]
    return _Attributes(module, values, tuple((value, value.copy()) for value in containers))


def _refill(container: _Container, content: _Container) -> None:
    container.clear()
    if isinstance(container, dict) and isinstance(content, dict):
        container.update(content)
    elif isinstance(container, list):
        container.extend(content)
