"""Steps that compute new tensors from old ones, in every form that a call can take."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from partita.testing.draft import Draft
from partita.testing.recipe import Picks

__all__ = ["FUNCTIONS", "METHODS", "OVERLOADS"]

aten = torch.ops.aten

_UNARY: tuple[Callable[..., Any], ...] = (
    torch.tanh,
    torch.sin,
    functional.gelu,
    torch.neg,
    operator.neg,
    torch.sigmoid,
    functional.silu,
)
_BINARY: tuple[Callable[..., Any], ...] = (
    torch.add,
    operator.sub,
    torch.mul,
    operator.add,
    torch.maximum,
    operator.mul,
)


def unary(draft: Draft, picks: Picks) -> None:
    draft.call(_UNARY[picks[1] % len(_UNARY)], draft.tensor(picks[0]))


def binary(draft: Draft, picks: Picks) -> None:
    left = draft.tensor(picks[0])
    draft.call(_BINARY[picks[2] % len(_BINARY)], left, draft.like(left, picks[1]))


def scaled(draft: Draft, picks: Picks) -> None:
    """A tensor and a number, which is a node where the program has one."""
    numbers = draft.valued(int, float)
    number = draft.choose(picks[1], numbers) if numbers and picks[2] % 2 == 0 else 0.5
    draft.call((operator.mul, torch.add, operator.truediv)[picks[2] % 3], draft.tensor(picks[0]), number)


def optional(draft: Draft, picks: Picks) -> None:
    """An argument that may be None, passed as a node where the program has one, and a flag likewise."""
    nothing, flags = draft.valued(type(None)), draft.valued(bool)
    weight = draft.choose(picks[1], nothing) if nothing else None
    normal = draft.call(functional.layer_norm, draft.matrix(picks[0]), (6,), weight=weight)
    if flags:
        draft.call(functional.leaky_relu, normal, 0.1, draft.choose(picks[1], flags))


def reduced(draft: Draft, picks: Picks) -> None:
    matrix = draft.matrix(picks[0])
    mean = draft.call((torch.mean, torch.sum)[picks[1] % 2], matrix, dim=picks[2] % 2, keepdim=True)
    draft.call(torch.sub, matrix, mean)


def selected(draft: Draft, picks: Picks) -> None:
    left = draft.tensor(picks[0])
    mask = draft.call(torch.gt, left, 0.1)
    draft.call(torch.where, mask, left, draft.like(left, picks[1]))


def product(draft: Draft, picks: Picks) -> None:
    left, right = draft.matrix(picks[0]), draft.matrix(picks[1])
    scores = draft.call(torch.matmul, left, draft.method("t", right))
    draft.call(torch.matmul, draft.call(functional.softmax, scores, dim=-1), right)


def discarded(draft: Draft, picks: Picks) -> None:
    """Work that nobody may ever use: numbers made from nothing."""
    draft.call((torch.zeros, torch.ones)[picks[0] % 2], (4, 6))


def overload(draft: Draft, picks: Picks) -> None:
    one = (aten.tanh.default, aten.cos.default, aten.neg.default, aten.clone.default, aten.relu.default)
    draft.call(one[picks[1] % len(one)], draft.tensor(picks[0]))


def binary_overload(draft: Draft, picks: Picks) -> None:
    two = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.minimum.default)
    left = draft.tensor(picks[0])
    draft.call(two[picks[2] % len(two)], left, draft.like(left, picks[1]))


def scalar_overload(draft: Draft, picks: Picks) -> None:
    draft.call((aten.add.Tensor, aten.mul.Tensor)[picks[1] % 2], draft.tensor(picks[0]), 0.5)


def method(draft: Draft, picks: Picks) -> None:
    names = ("tanh", "sin", "neg", "sigmoid", "clone", "contiguous", "float", "abs")
    draft.method(names[picks[1] % len(names)], draft.tensor(picks[0]))


def binary_method(draft: Draft, picks: Picks) -> None:
    left = draft.tensor(picks[0])
    draft.method(("add", "mul", "sub")[picks[2] % 3], left, draft.like(left, picks[1]))


FUNCTIONS: Mapping[str, Callable[[Draft, Picks], None]] = {
    "functions.unary": unary,
    "functions.binary": binary,
    "functions.scaled": scaled,
    "functions.optional": optional,
    "functions.reduced": reduced,
    "functions.selected": selected,
    "functions.product": product,
    "functions.discarded": discarded,
}
OVERLOADS: Mapping[str, Callable[[Draft, Picks], None]] = {
    "overloads.unary": overload,
    "overloads.binary": binary_overload,
    "overloads.scalar": scalar_overload,
}
METHODS: Mapping[str, Callable[[Draft, Picks], None]] = {"methods.unary": method, "methods.binary": binary_method}
