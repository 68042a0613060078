"""Containers among the inputs and outputs of a body, flattened for a compiler, which takes and returns leaves only.

They occur in programs without traced values.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.fx.immutable_collections import immutable_dict, immutable_list

from partita._torch.symbolic_shapes import SYMBOLIC
from partita.errors import BackendError


@final
@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is passed as an argument or a result."""


@final
@dataclass(frozen=True, slots=True)
class Fixed:
    """A value that is the same in every call, so that it need not be passed."""

    value: Any


@final
@dataclass(frozen=True, slots=True)
class Container:
    """A tuple, list, size, named tuple, dict or ordered dict; `keys` are those of a dict."""

    type: type
    items: tuple[Shape, ...]
    keys: tuple[Any, ...] | None = None


Shape: TypeAlias = Leaf | Fixed | Container

LEAF = Leaf()


def shape_of(value: Any, *, is_output: bool = False) -> Shape:
    """The container structure of a value.

    In an output, what is neither container nor tensor nor symbol is fixed; where it may hold tensors, or is mutable, a
    `BackendError` is raised.
    """
    kind = _container_type(value)
    if kind is None or (kind is OrderedDict and not is_output):
        return _fixed(value) if is_output and not isinstance(value, _LEAF_TYPES) else LEAF
    keys = tuple(value) if issubclass(kind, dict) else None
    items = value if keys is None else value.values()
    return Container(kind, tuple(shape_of(item, is_output=is_output) for item in items), keys)


_LEAF_TYPES = (Tensor, *SYMBOLIC)


def _container_type(value: Any) -> type | None:
    """The type that rebuilds a container from its items; None for what is none, or holds more than items."""
    kind = type(value)
    if kind in _LITERALS:
        return _LITERALS[kind]
    if kind in (tuple, list, torch.Size):
        return kind
    if kind in (dict, OrderedDict):
        return kind if all(map(_is_constant, value)) else None
    is_named = isinstance(value, tuple) and (hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields"))
    return kind if is_named and not getattr(value, "__dict__", None) else None


#: The types of list and dict literals in a graph under an interpreter: generated code has plain ones.
_LITERALS: dict[type, type] = {immutable_list: list, immutable_dict: dict}


def _fixed(value: Any) -> Fixed:
    if not _is_constant(value):
        raise BackendError(
            f"an output holds an object of type {type(value).__name__}, which cannot be taken apart; give tensors, "
            "numbers, text, None, and tuples, lists and dicts of them"
        )
    return Fixed(value)


def _is_constant(value: Any) -> bool:
    """Whether a value is immutable and holds no tensor or symbol."""
    if isinstance(value, slice):
        return all(map(_is_constant, (value.start, value.stop, value.step)))
    if type(value) in (tuple, frozenset):
        return all(map(_is_constant, value))
    return type(value) in _CONSTANTS or isinstance(value, Enum | type)


_NUMBERS_AND_TEXT = (bool, bytes, complex, float, int, range, str, type(None), type(Ellipsis), type(NotImplemented))
_CONSTANTS = frozenset((*_NUMBERS_AND_TEXT, torch.dtype, torch.device, torch.layout, torch.memory_format))


def leaves_of(value: Any, shape: Shape) -> Iterator[Any]:
    """The leaves of a value of this shape."""
    if isinstance(shape, Container):
        for key, inner in items_of(shape):
            yield from leaves_of(value[key], inner)
    elif isinstance(shape, Leaf):
        yield value


def read_leaves(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of a value, each with the keys by which it is read."""
    if isinstance(value, tuple | list):
        pairs: Any = enumerate(value)
    elif isinstance(value, dict):
        pairs = value.items()
    else:
        yield (), value
        return
    for key, item in pairs:
        for keys, leaf in read_leaves(item):
            yield (key, *keys), leaf


def leaf_count(shape: Shape) -> int:
    """The number of leaves of a value of this shape."""
    if isinstance(shape, Container):
        return sum(map(leaf_count, shape.items))
    return int(isinstance(shape, Leaf))


def has_tensors(value: Any) -> bool:
    """Whether a value is a tensor or a container with one."""
    return any(isinstance(leaf, Tensor) for _, leaf in read_leaves(value))


def items_of(shape: Container) -> Iterator[tuple[Any, Shape]]:
    """The shape of each item with what reads it by `getitem`."""
    return zip(range(len(shape.items)) if shape.keys is None else shape.keys, shape.items, strict=True)


def assembled(shape: Shape, leaves: Iterator[Any], make: Callable[..., Any] = operator.call) -> Any:
    """A value of this shape, with the next of `leaves` for each leaf; `make(type, *arguments)` builds containers."""
    if isinstance(shape, Leaf):
        return next(leaves)
    if isinstance(shape, Fixed):
        return shape.value
    items = [assembled(item, leaves, make) for item in shape.items]
    if shape.keys is not None:
        return make(shape.type, dict(zip(shape.keys, items, strict=True)))
    return make(shape.type, *items) if hasattr(shape.type, "_fields") else make(shape.type, tuple(items))
