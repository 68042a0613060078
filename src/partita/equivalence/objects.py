"""Objects that torch does not flatten, such as dataclasses and caches: opened down to their tensors, and copied."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.pytrees import Tree, flatten
from partita._torch.tensors import inner_tensors
from partita.equivalence.ambient import state_of
from partita.equivalence.values import has_equality, is_array, is_value

_DEEPEST = 32
_MOST = 10_000
#: Python's flag of types that a class statement made, or that can be made by one.
_HEAP_TYPE = 1 << 9
#: What pickle calls for an object that consists of its attributes.
_CONSTRUCTORS = tuple(vars(copyreg)[name] for name in ("__newobj__", "__newobj_ex__"))


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value whose content cannot be read: only its type, and whether it is the same object, can be compared."""

    value: object


@dataclass(frozen=True, slots=True)
class Containers:
    """The containers of torch's pytrees around some leaves; the paths tell key 1 from key True."""

    structure: object
    paths: tuple[str, ...]

    @classmethod
    def of(cls, tree: Tree) -> Containers:
        # A key without a text of its own is shown by its address. The leaves are not kept: they keep graphs alive.
        return cls(tree.structure, tuple(re.sub(r"0x[0-9a-f]+", "", path) for path in tree.paths))

    def __str__(self) -> str:
        return " ".join(str(self.structure).split())


@dataclass(frozen=True, slots=True)
class Shape:
    """The class of an object and the names of its members; `again` says that the object contains itself there."""

    type: type
    members: tuple[str, ...]
    again: bool = False

    def __str__(self) -> str:
        members = "..., the object around it" if self.again else ", ".join(self.members)
        return f"{self.type.__qualname__}({members})"


@dataclass(slots=True)
class Opened:
    """The leaves of a value by path, those inside objects included, and by path what is around them."""

    leaves: list[tuple[str, object]] = field(default_factory=list)
    structure: dict[str, Containers | Shape] = field(default_factory=dict)
    members: int = 0

    def _add(self, value: object, path: str, around: tuple[object, ...]) -> None:
        try:
            tree = flatten(value)
        except RecursionError:  # A list that contains itself.
            self.leaves.append((path, Opaque(value)))
            return
        if tree.paths != ("",) or not path:
            self.structure[f"{path}:"] = Containers.of(tree)
        for place, leaf in zip(tree.paths, tree.leaves, strict=True):
            self._add_leaf(leaf, path + place, around)

    def _add_leaf(self, leaf: object, path: str, around: tuple[object, ...]) -> None:
        if isinstance(leaf, Tensor):
            self.leaves.append((path, leaf))
            attributes = _attributes_of(leaf)
            if attributes and not any(leaf is outer for outer in around):
                self._add_members(leaf, attributes, path, around)
            return
        if is_value(leaf) or state_of(leaf) is not None:
            self.leaves.append((path, leaf))
            return
        if any(leaf is outer for outer in around):
            self.structure[path] = Shape(type(leaf), (), again=True)
            return
        members = None if len(around) >= _DEEPEST else _members(leaf)
        if members is None or self.members + len(members) > _MOST:
            self.leaves.append((path, Opaque(leaf)))
            return
        self._add_members(leaf, members, path, around)

    def _add_members(self, leaf: object, members: dict[str, object], path: str, around: tuple[object, ...]) -> None:
        self.members += len(members)
        self.structure[path] = Shape(type(leaf), tuple(members))
        for name, member in members.items():
            self._add(member, path + name, (*around, leaf))


def opened(value: object) -> Opened:
    """`value` opened: pytrees, dataclasses by their fields, other plain objects by their attributes."""
    found = Opened()
    found._add(value, "", ())
    return found


def opened_leaf(leaf: object) -> Opened | None:
    """A leaf of a pytree opened, None if it is a tensor, a generator or a value that nothing can mutate."""
    if isinstance(leaf, Tensor):
        return None
    found = Opened()
    found._add_leaf(leaf, "", ())
    may_be_mutated = found.structure or isinstance(found.leaves[0][1], Opaque | bytearray | set)
    return found if may_be_mutated or is_array(leaf) else None


def _members(value: Any) -> dict[str, object] | None:
    """The members of an object by the text that reads them; None where they are not all that it consists of."""
    if isinstance(value, nn.Module) or type(value) is object:
        return None
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {f".{name}": getattr(value, name) for name in names if hasattr(value, name)}
    found: dict[str, object] = {}
    if isinstance(value, dict):
        found.update({f"[{key!r}]": member for key, member in dict.items(value)})
    elif isinstance(value, list | tuple):
        found.update({f"[{place}]": member for place, member in enumerate(value)})
    elif not _is_plain(value):
        return None
    found.update({f".{name}": member for name, member in getattr(value, "__dict__", {}).items()})
    found.update({f".{name}": getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)})
    if has_equality(value) and not any(isinstance(part, Tensor) for part in _inside(found)):
        return None  # It says itself what it is equal to, and attributes may be caches.
    return found


def _attributes_of(tensor: Tensor) -> dict[str, object]:
    """What an instance of a subclass of somebody else's holds beside its elements, by the text that reads it."""
    if _is_of_torch(tensor):
        return {}
    inner = inner_tensors(tensor)
    found = {name: value for name, value in vars(tensor).items() if name not in inner}
    slots = (name for name in _slots_of(type(tensor)) if name not in inner and hasattr(tensor, name))
    found.update({name: getattr(tensor, name) for name in slots})
    return {f".{name}": value for name, value in found.items()}


def _is_of_torch(tensor: Tensor) -> bool:
    """Whether torch itself wrote the class of a tensor: what such an instance holds are caches and layouts."""
    return type(tensor).__module__.partition(".")[0] == "torch"


def carry_attributes(tensor: Tensor, other: Tensor) -> None:
    """Gives `other`, made of `tensor`, copies of the attributes that were set on that instance of a subclass."""
    if _is_of_torch(tensor):
        return
    table = vars(other)
    for name, value in vars(tensor).items():
        if name not in table:
            table[name] = _copied(value)


def _copied(value: object) -> object:
    if isinstance(value, Tensor) and value.requires_grad:
        return value  # Gradients are asked for of this very tensor.
    try:
        return copy.deepcopy(value)
    except Exception:  # Whatever the object's own code raises.
        return value


def _inside(members: Mapping[str, object]) -> Iterable[object]:
    try:
        return [leaf for member in members.values() for leaf in flatten(member).leaves]
    except RecursionError:
        return ()


def _is_plain(value: Any) -> bool:
    """Whether an object is of a class written in Python, so that it consists of its attributes."""
    if not all(base is object or base.__flags__ & _HEAP_TYPE for base in type(value).__mro__):
        return False
    try:
        reduced = object.__reduce_ex__(value, 2)
    except Exception:  # Types of extensions refuse, and what a class does in order to be pickled is unknown.
        return False
    return isinstance(reduced, tuple) and reduced[0] in _CONSTRUCTORS


def _slots_of(cls: type) -> list[str]:
    found = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return found


@dataclass(frozen=True, slots=True)
class Held:
    """An object among the arguments: its number, the tensors and generators inside, and what cannot be copied."""

    number: int
    value: object
    inside: tuple[tuple[str, object], ...]
    shared: tuple[tuple[str, object], ...]

    def copied(self, parts: Iterable[object], memo: dict[int, Any]) -> object:
        """A copy with `parts` in place of what is inside; `memo` holds what else was copied for this call.

        What can neither be read nor compared is shared with the original.
        """
        memo.update({id(old): new for (_, old), new in zip(self.inside, parts, strict=True)})
        memo.update({id(value): value for _, value in self.shared})
        return copy.deepcopy(self.value, memo)


def held_in(leaves: Iterable[object]) -> list[Held]:
    """The objects among the leaves of a pytree."""
    found = []
    for number, leaf in enumerate(leaves):
        inner = opened_leaf(leaf)
        if inner is not None:
            inside = [(path, part) for path, part in inner.leaves if isinstance(part, Tensor | torch.Generator)]
            opaque = [(path, part) for path, part in inner.leaves if isinstance(part, Opaque)]
            shared = [(path, part.value) for path, part in opaque if not has_equality(part.value)]
            found.append(Held(number, leaf, tuple(inside), tuple(shared)))
    return found
