"""Containers that cross a border whole, as programs without traced values have them: taken apart for a compiler.

A compiler takes and gives tensors and numbers. What is in a container goes as inputs and outputs of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

__all__ = [
    "LEAF",
    "Container",
    "Fixed",
    "Leaf",
    "Shape",
    "assembled",
    "has_tensors",
    "items_of",
    "leaf_count",
    "leaves_of",
    "read_leaves",
    "shape_of",
]


@final
@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is passed on."""


@final
@dataclass(frozen=True, slots=True)
class Fixed:
    """A value that is the same in every call, so that nobody needs to pass it on."""

    value: Any


@final
@dataclass(frozen=True, slots=True)
class Container:
    """A tuple, list, size, named tuple or dict; `keys` are those of a dict."""

    type: type
    items: tuple[Shape, ...]
    keys: tuple[Any, ...] | None = None


Shape: TypeAlias = Leaf | Fixed | Container

LEAF = Leaf()


def shape_of(value: Any, *, fixes_constants: bool = False) -> Shape:
    """How a value is made up of containers; all that is neither one nor tensor nor symbol may be fixed."""
    if isinstance(value, tuple | list):
        return Container(type(value), tuple(shape_of(item, fixes_constants=fixes_constants) for item in value))
    if type(value) is dict:
        items = tuple(shape_of(item, fixes_constants=fixes_constants) for item in value.values())
        return Container(dict, items, tuple(value))
    return Fixed(value) if fixes_constants and not isinstance(value, _PASSED_ON) else LEAF


_PASSED_ON = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def leaves_of(value: Any, shape: Shape) -> Iterator[Any]:
    """What is passed on of a value of this shape."""
    if isinstance(shape, Container):
        for key, inner in items_of(shape):
            yield from leaves_of(value[key], inner)
    elif isinstance(shape, Leaf):
        yield value


def read_leaves(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of a value, each with the keys by which it is read."""
    if isinstance(value, tuple | list):
        pairs: Any = enumerate(value)
    elif type(value) is dict:
        pairs = value.items()
    else:
        yield (), value
        return
    for key, item in pairs:
        for keys, leaf in read_leaves(item):
            yield (key, *keys), leaf


def leaf_count(shape: Shape) -> int:
    """How much is passed on of a value of this shape."""
    if isinstance(shape, Container):
        return sum(map(leaf_count, shape.items))
    return int(isinstance(shape, Leaf))


def has_tensors(value: Any) -> bool:
    """Whether a value is a tensor or a container with one."""
    return any(isinstance(leaf, Tensor) for leaf in leaves_of(value, shape_of(value)))


def items_of(shape: Container) -> Iterator[tuple[Any, Shape]]:
    """The shape of each item with what reads it by `getitem`."""
    return zip(range(len(shape.items)) if shape.keys is None else shape.keys, shape.items, strict=True)


def assembled(shape: Shape, leaves: Iterator[Any], make: Callable[..., Any] = operator.call) -> Any:
    """A value of this shape, with the next of `leaves` for each leaf; `make(type, *given)` makes containers."""
    if isinstance(shape, Leaf):
        return next(leaves)
    if isinstance(shape, Fixed):
        return shape.value
    items = [assembled(item, leaves, make) for item in shape.items]
    if shape.keys is not None:
        return make(dict, dict(zip(shape.keys, items, strict=True)))
    return make(shape.type, *items) if hasattr(shape.type, "_fields") else make(shape.type, tuple(items))
