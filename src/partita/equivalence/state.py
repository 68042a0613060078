"""The tensors a module holds: where, in which storage, paired between two programs, and restored from a snapshot."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor, UntypedStorage
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.utils import swap_tensors

from partita._torch.pytrees import flatten
from partita._torch.tensors import base_of, inner_tensors, plain_tensors

_REGISTERED = frozenset(("_parameters", "_buffers", "_modules"))


@dataclass(frozen=True, slots=True)
class Slot:
    """An attribute of a module that holds a tensor, or one leaf of a container that is an attribute."""

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
        """The tensor that the attribute holds now, which may be another one."""
        value = getattr(self.owner, self.attribute, None)
        if self.leaf is not None:
            leaves = flatten(value).leaves
            value = leaves[self.leaf] if self.leaf < len(leaves) else None
        return value if isinstance(value, Tensor) else None


def slots_of(root: Module | None) -> tuple[Slot, ...]:
    """Every slot below `root` that holds a tensor with data: parameters, buffers and plain attributes."""
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
        elif isinstance(value, list | tuple | dict) and value and not isinstance(owner, GraphModule):
            yield from _slots_in(value, prefix, owner, name)


def _slots_in(container: object, prefix: str, owner: Module, name: str) -> Iterator[Slot]:
    tree = flatten(container)
    for leaf, (path, item) in enumerate(zip(tree.paths, tree.leaves, strict=True)):
        if isinstance(item, Tensor):
            yield Slot(f"{prefix}{name}{path}", "attribute", owner, name, leaf, item)


@dataclass(frozen=True, slots=True)
class Places:
    """Modules with their names, and at which of their attributes tensors are at one moment; and what else is known."""

    modules: tuple[tuple[str, Module], ...]
    known: frozenset[int]
    taken: frozenset[tuple[int, str, int | None]]

    @classmethod
    def of(cls, modules: Iterable[tuple[str, Module]], *, among: Iterable[Module]) -> Places:
        # A graph sets no attributes.
        named = tuple((name, module) for name, module in modules if not isinstance(module, GraphModule))
        slots = (slot for name, module in named for slot in _own_slots(name and name + ".", module))
        taken = frozenset((id(slot.owner), slot.attribute, slot.leaf) for slot in slots)
        return cls(named, frozenset(map(id, among)), taken)

    def added(self) -> dict[str, Tensor]:
        """The tensors now at other attributes, or in modules that were not there, by label."""
        found: dict[str, Tensor] = {}
        for name, module in self.modules:
            prefix = name and name + "."
            for slot in _own_slots(prefix, module):
                if (id(slot.owner), slot.attribute, slot.leaf) not in self.taken:
                    found[slot.label] = slot.tensor
            for child, new in module.named_children():
                if id(new) not in self.known:
                    owners = new.named_modules(prefix=prefix + child)
                    slots = (_own_slots(f"{path}.", owner) for path, owner in owners)
                    found.update({slot.label: slot.tensor for own in slots for slot in own})
        return found


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """The storage of a tensor; None where it has none to read (sparse, fake, meta, some subclasses).

    That of a wrapper, such as a DTensor, is the storage of its first inner tensor.
    """
    try:
        storage = plain_tensors(tensor)[0].untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return None if storage.device.type == "meta" else storage


def storage_key(tensor: Tensor) -> int | None:
    """A number that two living tensors share exactly when they share a storage."""
    storage = storage_of(tensor)
    return None if storage is None else _key(storage)


def _key(storage: UntypedStorage) -> int:
    # The address of the data will not do: all empty storages have address 0.
    return int(StorageWeakRef(storage).cdata)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory in which tensors lie at one moment, held so that its addresses are not used again."""

    places: tuple[tuple[str, Tensor, UntypedStorage], ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> Memory:
        found = ((label, tensor, storage_of(tensor)) for label, tensor in named)
        return cls(tuple((label, tensor, storage) for label, tensor, storage in found if storage is not None))

    def left(self) -> frozenset[str]:
        """The names of the tensors that lie in other memory now, as after `tensor.data = ...`."""
        pairs = ((label, storage_of(tensor), storage) for label, tensor, storage in self.places)
        return frozenset(label for label, now, storage in pairs if now is None or _key(now) != _key(storage))


@dataclass(frozen=True, slots=True)
class Pairing:
    """For each state tensor of the original the slot of the other program that holds it, under the original's name."""

    before: tuple[Slot, ...]
    after: tuple[Slot, ...]
    notes: tuple[str, ...]


def paired(before: Sequence[Slot], after: Sequence[Slot]) -> Pairing:
    """Pairs by identity, then by memory, then by name; a program that shares nothing may be paired by position.

    A tensor that the other program does not hold is paired with itself: no call of that program mutates it.
    """
    found = _by_identity(before, after)
    copies = _by_name(before, after, taken=found)
    if not found and not copies:
        is_alike = len(before) == len(after) and all(map(_alike, before, after))
        copies = dict(enumerate(after)) if is_alike else {}
    places = tuple(found.get(place) or copies.get(place) or slot for place, slot in enumerate(before))
    return Pairing(tuple(before), places, _notes(before, copies))


def _by_identity(before: Sequence[Slot], after: Sequence[Slot]) -> dict[int, Slot]:
    objects = {id(slot.tensor): slot for slot in reversed(after)}
    places = {_place(slot.tensor): slot for slot in reversed(after)}
    found = {n: objects.get(id(slot.tensor)) or places.get(_place(slot.tensor)) for n, slot in enumerate(before)}
    return {number: slot for number, slot in found.items() if slot is not None}


def _by_name(before: Sequence[Slot], after: Sequence[Slot], *, taken: dict[int, Slot]) -> dict[int, Slot]:
    shared = {id(slot.tensor) for slot in taken.values()}
    named = {slot.name: slot for slot in after if id(slot.tensor) not in shared}
    return {
        number: named[slot.name]
        for number, slot in enumerate(before)
        if number not in taken and slot.name in named and _alike(slot, named[slot.name])
    }


def _place(tensor: Tensor) -> tuple[object, ...]:
    return storage_key(tensor), tensor.dtype, *_extent(tensor)


def _alike(one: Slot, other: Slot) -> bool:
    return one.tensor.shape == other.tensor.shape and one.tensor.dtype == other.tensor.dtype


def _notes(before: Sequence[Slot], copies: dict[int, Slot]) -> tuple[str, ...]:
    if not copies:
        return ()
    number, other = next(iter(copies.items()))
    how = "name" if before[number].name == other.name else "position"
    return (
        f"{len(copies)} of {len(before)} state tensors are not shared but copies, paired by {how} "
        f"(the first is {before[number].label})",
    )


@dataclass(frozen=True, slots=True)
class Alias:
    """The first named tensor in the same storage, and the offset from it in elements."""

    name: str
    offset: int

    def __str__(self) -> str:
        return f"shares memory with {self.name}" + (f" from element {self.offset} on" if self.offset else "")


def aliases_of(
    outputs: Iterable[tuple[str, Tensor]], around: Iterable[tuple[str, Tensor]]
) -> tuple[tuple[str, Alias | None], ...]:
    """Which of the tensors `around` the call, or of the outputs before it, each output aliases; None for new memory."""
    known: dict[int, tuple[str, int]] = {}
    for name, tensor in around:
        key = storage_key(tensor)
        if key is not None:
            known.setdefault(key, (name, int(tensor.storage_offset())))
    aliases: list[tuple[str, Alias | None]] = []
    for name, tensor in outputs:
        key = storage_key(tensor)
        if key is None or key not in known:
            aliases.append((name, None))
        else:
            owner, start = known[key]
            aliases.append((name, Alias(owner, int(tensor.storage_offset()) - start)))
        if key is not None:
            known.setdefault(key, (name, int(tensor.storage_offset())))
    return tuple(aliases)


_Container: TypeAlias = list[object] | dict[object, object]

_REFILLED = (list, dict, OrderedDict, defaultdict)
_PLAIN = (type(None), bool, int, float, complex, str, Tensor, tuple, list, dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of the memory that may be mutated, and the layouts and attributes of all tensors and modules."""

    memory: tuple[tuple[UntypedStorage, UntypedStorage], ...]
    layouts: tuple[Layout, ...]
    attributes: tuple[_Attributes, ...]

    def restore(self) -> None:
        """Restores everything."""
        for attributes in self.attributes:
            attributes.restore()
        for layout in self.layouts:
            layout.restore()
        for storage, copy in self.memory:
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)


def snapshot_of(roots: Iterable[Module], slots: Iterable[Slot], *, mutated: frozenset[int]) -> Snapshot:
    """A snapshot of these modules that copies only memory whose storage key is in `mutated`."""
    held = {id(slot.tensor): slot.tensor for slot in slots}.values()
    wrappers = [tensor for tensor in held if inner_tensors(tensor)]
    tensors = {id(plain): plain for tensor in held for plain in plain_tensors(tensor)}.values()
    memory: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        key, storage = storage_key(tensor), storage_of(tensor)
        if key is not None and storage is not None and key in mutated:
            memory.setdefault(key, storage)
    modules = {id(module): module for root in roots for module in root.modules()}.values()
    return Snapshot(
        memory=tuple((storage, storage.clone()) for storage in memory.values()),
        layouts=tuple(map(Layout.of, (*wrappers, *tensors))),
        # A graph mutates tensors, never attributes; what changes in its module is code that is generated lazily.
        attributes=tuple(_attributes_of(module) for module in modules if not isinstance(module, GraphModule)),
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a tensor lies in its storage; of a wrapper subclass, its inner tensors, which have layouts of their own."""

    tensor: Tensor
    place: tuple[UntypedStorage, int, torch.Size, tuple[int, ...]] | None
    inner: dict[str, Tensor]
    requires_grad: bool
    in_graph: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        inner = inner_tensors(tensor)
        place = None if inner else (tensor.untyped_storage(), *_extent(tensor))
        return cls(tensor, place, inner, tensor.requires_grad, tensor.grad_fn is not None)

    @torch.no_grad()
    def restore(self) -> None:
        tensor = self.tensor
        if self.in_graph:
            return
        if tensor.grad_fn is not None:
            detach_in_place(tensor)
        for name, inner in self.inner.items():
            if getattr(tensor, name) is not inner:
                setattr(tensor, name, inner)
        if self.place is not None:
            storage, *extent = self.place
            if [*_extent(tensor)] != extent or tensor.untyped_storage().data_ptr() != storage.data_ptr():
                tensor.set_(*self.place)
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)


def _extent(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
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
    containers = list(_containers_in(values.values(), set()))
    return _Attributes(module, values, tuple((value, value.copy()) for value in containers))


def _containers_in(values: Iterable[object], seen: set[int]) -> Iterator[_Container]:
    """The containers among some values, at any depth."""
    for value in values:
        if type(value) in (*_REFILLED, tuple) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, list | dict):
                yield value
            inside = value.values() if isinstance(value, dict) else value
            yield from _containers_in(cast(Iterable[object], inside), seen)


def _refill(container: _Container, content: _Container) -> None:
    container.clear()
    if isinstance(container, dict) and isinstance(content, dict):
        container.update(content)
    elif isinstance(container, list):
        container.extend(content)


def detach_in_place(tensor: Tensor) -> None:
    """Detaches `tensor`, which stays the same object; also a view and its base, which `Tensor.detach_` refuses."""
    base = base_of(tensor)
    if base is None:
        tensor.detach_()
        return
    if base.grad_fn is not None:
        base.detach_()
    # A view that is created under no_grad could not be mutated with gradients later.
    with torch.enable_grad():
        fresh = base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    # If the graph is still referenced, the tensor stays in it: a backward pass through it raises in both programs.
    with suppress(RuntimeError):
        swap_tensors(tensor, fresh)
