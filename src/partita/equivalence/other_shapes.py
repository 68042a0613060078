"""Other shapes: the same arguments with other sizes wherever a graph says that a size is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from partita._torch.symbolic import symbol_of, symbols_in
from partita.equivalence.inputs import Arguments
from partita.graphs.values import value_of

__all__ = ["resized"]

_STEPS: tuple[Callable[[int], int], ...] = (lambda size: size + 1, lambda size: 2 * size, lambda size: size - 1)


def resized(arguments: Arguments, placeholders: Sequence[Node]) -> Iterator[tuple[str, Arguments]]:
    """Arguments with every free size changed alike, in several ways, each with words such as `s0 = 5`.

    Nobody knows which sizes the program accepts, so whoever asks tries them in turn.
    """
    if not arguments.matches(placeholders):
        return
    values = [value_of(node) for node in placeholders]
    sizes = _sizes(values, arguments.tree.leaves)
    for step in _STEPS if sizes else ():
        others = {symbol: max(step(size), 1) for symbol, size in sizes.items()}
        leaves = [_other(leaf, value, others) for leaf, value in zip(arguments.tree.leaves, values, strict=True)]
        words = ", ".join(f"{symbol} = {size}" for symbol, size in others.items())
        yield words, Arguments(replace(arguments.tree, leaves=tuple(leaves)))


def _sizes(values: Sequence[Any], leaves: Sequence[object]) -> dict[Any, int]:
    """The symbols that stand alone as an input or a size, and what the arguments give for them."""
    sizes: dict[Any, int] = {}
    for value, leaf in zip(values, leaves, strict=True):
        pairs: Sequence[tuple[Any, Any]] = [(value, leaf)]
        if isinstance(value, Tensor) and isinstance(leaf, Tensor):
            pairs = list(zip(value.shape, leaf.shape, strict=False))
        for size, given in pairs:
            symbol = symbol_of(size)
            if symbol is not None and type(given) is int:
                sizes.setdefault(symbol, given)
    return sizes


def _other(leaf: object, value: Any, sizes: Mapping[Any, int]) -> object:
    if isinstance(value, Tensor) and isinstance(leaf, Tensor) and symbols_in(value):
        return _stretched(leaf, [_evaluated(size, sizes) for size in value.shape])
    return _evaluated(value, sizes) if isinstance(value, torch.SymInt) else leaf


def _evaluated(size: Any, sizes: Mapping[Any, int]) -> int:
    return int(size.node.expr.subs(sizes)) if isinstance(size, torch.SymInt) else int(size)


def _stretched(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """The tensor cut off or repeated along each axis, its axes in the same order in memory."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    other = tensor.detach().permute(order)
    for axis, source in enumerate(order):
        if tensor.shape[source] != sizes[source]:
            places = torch.arange(sizes[source], device=tensor.device) % max(tensor.shape[source], 1)
            other = other.index_select(axis, places)
    back = sorted(range(tensor.ndim), key=order.__getitem__)
    return other.contiguous().permute(back).requires_grad_(tensor.requires_grad)
