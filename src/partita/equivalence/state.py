"""State: the tensors that a module holds, and where it holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module

from partita._torch.trees import flatten
from partita.equivalence.storages import storage_of

__all__ = ["Slot", "slots_of"]

_REGISTERED = frozenset(("_parameters", "_buffers", "_modules"))


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a module that holds a tensor: an attribute, or one leaf of a container that is an attribute."""

    name: str
    kind: str
    owner: Module
    attribute: str
    leaf: int | None
    tensor: Tensor

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name!r}"

    def current(self) -> Tensor | None:
        """What is in this place now, which may be another tensor than before."""
        value = getattr(self.owner, self.attribute, None)
        if self.leaf is not None:
            leaves = flatten(value).leaves
            value = leaves[self.leaf] if self.leaf < len(leaves) else None
        return value if isinstance(value, Tensor) else None


def slots_of(root: Module | None) -> tuple[Slot, ...]:
    """Every place below `root` that holds a tensor with data: parameters, buffers and plain attributes."""
    if root is None:
        return ()
    slots = (slot for prefix, owner in root.named_modules() for slot in _own_slots(prefix and prefix + ".", owner))
    return tuple(slot for slot in slots if storage_of(slot.tensor) is not None)


def _own_slots(prefix: str, owner: Module) -> Iterator[Slot]:
    for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
        yield Slot(prefix + name, "parameter", owner, name, None, parameter)
    for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
        yield Slot(prefix + name, "buffer", owner, name, None, buffer)
    for name, value in vars(owner).items():
        if name in _REGISTERED:
            continue
        if isinstance(value, Tensor):
            yield Slot(prefix + name, "attribute", owner, name, None, value)
        elif isinstance(value, list | tuple | dict) and not isinstance(owner, GraphModule):
            yield from _slots_in(value, prefix, owner, name)


def _slots_in(container: object, prefix: str, owner: Module, name: str) -> Iterator[Slot]:
    tree = flatten(container)
    for leaf, (path, item) in enumerate(zip(tree.paths, tree.leaves, strict=True)):
        if isinstance(item, Tensor):
            yield Slot(f"{prefix}{name}{path}", "attribute", owner, name, leaf, item)
