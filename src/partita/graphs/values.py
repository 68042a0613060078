"""Traced values: what the tracer noted about the result of a node, under either of the two names it uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita.graphs.attributes import find

__all__ = ["VALUE_KEYS", "bytes_of", "bytes_of_value", "container_items", "crossing_places", "tensors_in", "value_of"]

#: torch.export and make_fx write "val", Dynamo writes "example_value".
VALUE_KEYS = ("val", "example_value")


def value_of(node: Node) -> Any:
    """The traced value of `node`, or None where nothing was noted."""
    meta = node.meta
    for key in VALUE_KEYS:
        if key in meta:
            return meta[key]
    return None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a traced value, in order; tracers write containers as tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def container_items(node: Node) -> tuple[Any, ...] | None:
    """The traced items of a plain tuple, list or torch.Size; None where `node` gives something else or unknown."""
    value = value_of(node)
    return tuple(value) if type(value) in (tuple, list, torch.Size) else None


def crossing_places(items: Sequence[Any]) -> tuple[int, ...]:
    """The places of a container whose items must be passed on; the others are known constants.

    A tracer that writes symbols into a size has made sure of the plain numbers beside them. Sizes of nothing but plain
    numbers may be those of an example, so these are passed on.
    """
    fixed = any(isinstance(item, torch.SymInt) for item in items)
    return tuple(place for place, item in enumerate(items) if not fixed or type(item) is not int)


def bytes_of(node: Node, root: GraphModule | None = None) -> int | None:
    """The bytes of the tensors that `node` gives; None where that is unknown or symbolic."""
    value = value_of(node)
    if value is None and node.op == "get_attr" and root is not None:
        value = find(root, str(node.target))
    return None if value is None else bytes_of_value(value)


def bytes_of_value(value: Any) -> int | None:
    """The bytes of a traced tensor, or of all in a container; None where a size is symbolic."""
    total = 0
    for item in value if isinstance(value, tuple | list) else (value,):
        if isinstance(item, torch.Tensor):
            count = item.numel()
            if not isinstance(count, int):
                return None
            total += count * item.element_size()
    return total
