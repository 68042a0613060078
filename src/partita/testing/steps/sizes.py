"""Steps that read sizes and other plain numbers, and use them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch

from partita.testing.draft import Draft
from partita.testing.recipe import Picks

__all__ = ["ITEMS", "SIZES"]


def size(draft: Draft, picks: Picks) -> None:
    """A whole size, kept for whoever wants it, and sometimes one number of it."""
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
    draft.call((torch.zeros, torch.ones)[picks[1] % 2], whole)


def item(draft: Draft, picks: Picks) -> None:
    """A plain number that depends on values."""
    total = draft.method("mean", draft.tensor(picks[0]))
    draft.call(torch.mul, draft.tensor(picks[1]), draft.method("item", draft.method("tanh", total)))


SIZES: Mapping[str, Callable[[Draft, Picks], None]] = {
    "sizes.size": size,
    "sizes.length": length,
    "sizes.arithmetic": arithmetic,
    "sizes.viewed": viewed,
    "sizes.reshaped": reshaped,
    "sizes.filled": filled,
}
ITEMS: Mapping[str, Callable[[Draft, Picks], None]] = {"items.item": item}
