"""Steps that compute new tensors, in every form of a call: functions, overloads, methods, keywords; and sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from partita.testing.generator.draft import Draft, Steps, on_default_device
from partita.testing.generator.recipe import Picks

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


def binary(draft: Draft, picks: Picks) -> None:
    left = draft.tensor(picks[0])
    draft.call(_BINARY[picks[2] % len(_BINARY)], left, draft.like(left, picks[1]))


def scaled(draft: Draft, picks: Picks) -> None:
    """A tensor and a number, which is a node where the program has one."""
    numbers = draft.valued(int, float)
    number = draft.choose(picks[1], numbers) if numbers and picks[2] % 2 == 0 else 0.5
    draft.call((operator.mul, torch.add, operator.truediv)[picks[2] % 3], draft.tensor(picks[0]), number)


def optional(draft: Draft, picks: Picks) -> None:
    """An optional argument and a flag, passed as nodes where the program has them."""
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
    """A result that may stay unused: a constant tensor."""
    draft.call((torch.zeros, torch.ones)[picks[0] % 2], (4, 6), **on_default_device())


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


FUNCTIONS: Steps = {
    "functions.unary": lambda draft, picks: draft.call(_UNARY[picks[1] % len(_UNARY)], draft.tensor(picks[0])),
    "functions.binary": binary,
    "functions.scaled": scaled,
    "functions.optional": optional,
    "functions.reduced": reduced,
    "functions.selected": selected,
    "functions.product": product,
    "functions.discarded": discarded,
}
OVERLOADS: Steps = {
    "overloads.unary": overload,
    "overloads.binary": binary_overload,
    "overloads.scalar": scalar_overload,
}
METHODS: Steps = {"methods.unary": method, "methods.binary": binary_method}


def unary_by_keyword(draft: Draft, picks: Picks) -> None:
    draft.call((torch.tanh, functional.gelu, torch.neg)[picks[1] % 3], input=draft.tensor(picks[0]))


def binary_by_keyword(draft: Draft, picks: Picks) -> None:
    left = draft.tensor(picks[0])
    draft.call((torch.mul, torch.add, torch.sub)[picks[2] % 3], input=left, other=draft.like(left, picks[1]))


def view(draft: Draft, picks: Picks) -> None:
    tensor = draft.tensor(picks[0])
    match picks[1] % 4:
        case 0:
            draft.call(torch.flatten, input=tensor)
        case 1:
            draft.call(torch.transpose, input=tensor, dim0=0, dim1=-1)
        case 2:
            draft.call(torch.narrow, input=tensor, dim=0, start=0, length=2)
        case _:
            draft.method("view_as", tensor, other=tensor)


def mutation(draft: Draft, picks: Picks) -> None:
    mutated = draft.mutable(picks[0])
    match picks[1] % 3:
        case 0:
            draft.call(torch.relu_, input=mutated)
        case 1:
            draft.call(functional.relu, input=mutated, inplace=True)
        case _:
            draft.method("add_", mutated, other=0.25)


def parts(draft: Draft, picks: Picks) -> None:
    """A list of tensors by keyword."""
    left = draft.tensor(picks[0])
    draft.call(torch.cat, tensors=[left, draft.like(left, picks[1])], dim=picks[2] % 2)


KEYWORDS: Steps = {
    "keywords.unary": unary_by_keyword,
    "keywords.binary": binary_by_keyword,
    "keywords.view": view,
    "keywords.write": mutation,
    "keywords.parts": parts,
}


def size(draft: Draft, picks: Picks) -> None:
    """A whole size, and sometimes one number of it."""
    tensor = draft.tensor(picks[0])
    whole = draft.call(getattr, tensor, "shape") if picks[1] % 2 else draft.method("size", tensor)
    if picks[2] % 2:
        draft.call(operator.getitem, whole, 0)


def length(draft: Draft, picks: Picks) -> None:
    forms = (("size", 0), ("size", -1), ("dim",), ("numel",))
    name, *rest = forms[picks[1] % len(forms)]
    draft.method(str(name), draft.tensor(picks[0]), *rest)


def arithmetic(draft: Draft, picks: Picks) -> None:
    numbers = draft.valued(int)
    draft.call(operator.mul, draft.choose(picks[0], numbers), draft.choose(picks[1], numbers))


def viewed(draft: Draft, picks: Picks) -> None:
    """A view to a size read from another tensor of that many elements."""
    tensor = draft.tensor(picks[0])
    other = draft.like(tensor, picks[1])
    flat = draft.method(("reshape", "view")[picks[2] % 2], tensor, -1)
    draft.method("view", flat, draft.method("size", other))


def reshaped(draft: Draft, picks: Picks) -> None:
    """A view to sizes read one by one."""
    matrix = draft.matrix(picks[0])
    rows, columns = draft.method("size", matrix, 0), draft.method("size", matrix, 1)
    draft.method("reshape", matrix, columns, rows) if picks[1] % 2 else draft.call(
        torch.reshape, matrix, (draft.call(operator.mul, rows, columns),)
    )


def filled(draft: Draft, picks: Picks) -> None:
    whole = draft.method("size", draft.tensor(picks[0]))
    draft.call((torch.zeros, torch.ones)[picks[1] % 2], whole, **on_default_device())


def item(draft: Draft, picks: Picks) -> None:
    """A plain number that depends on values."""
    total = draft.method("mean", draft.tensor(picks[0]))
    draft.call(torch.mul, draft.tensor(picks[1]), draft.method("item", draft.method("tanh", total)))


SIZES: Steps = {
    "sizes.size": size,
    "sizes.length": length,
    "sizes.arithmetic": arithmetic,
    "sizes.viewed": viewed,
    "sizes.reshaped": reshaped,
    "sizes.filled": filled,
}
ITEMS: Steps = {"items.item": item}
