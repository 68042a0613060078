"""Steps that pass their tensors by keyword, under the names that torch's Python functions have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from partita.testing.draft import Draft
from partita.testing.recipe import Picks

__all__ = ["KEYWORDS"]


def unary(draft: Draft, picks: Picks) -> None:
    draft.call((torch.tanh, functional.gelu, torch.neg)[picks[1] % 3], input=draft.tensor(picks[0]))


def binary(draft: Draft, picks: Picks) -> None:
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


def write(draft: Draft, picks: Picks) -> None:
    written = draft.writable(picks[0])
    match picks[1] % 3:
        case 0:
            draft.call(torch.relu_, input=written)
        case 1:
            draft.call(functional.relu, input=written, inplace=True)
        case _:
            draft.method("add_", written, other=0.25)


def parts(draft: Draft, picks: Picks) -> None:
    """A list of tensors by keyword."""
    left = draft.tensor(picks[0])
    draft.call(torch.cat, tensors=[left, draft.like(left, picks[1])], dim=picks[2] % 2)


KEYWORDS: Mapping[str, Callable[[Draft, Picks], None]] = {
    "keywords.unary": unary,
    "keywords.binary": binary,
    "keywords.view": view,
    "keywords.write": write,
    "keywords.parts": parts,
}
