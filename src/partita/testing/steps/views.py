"""Steps whose result may share the storage of their operand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch.fx import Node
from torch.nn import functional

from partita.testing.draft import Draft
from partita.testing.recipe import Picks

__all__ = ["VIEWS", "view_of"]

aten = torch.ops.aten


def view(draft: Draft, picks: Picks) -> None:
    view_of(draft, draft.tensor(picks[0]), picks[1])


def view_of_view(draft: Draft, picks: Picks) -> None:
    view_of(draft, view_of(draft, draft.tensor(picks[0]), picks[1]), picks[2])


def detached(draft: Draft, picks: Picks) -> None:
    tensor = draft.tensor(picks[0])
    draft.call(aten.detach.default, tensor) if picks[1] % 2 else draft.method("detach", tensor)


def perhaps_alias(draft: Draft, picks: Picks) -> None:
    """An operator that gives back its operand when there is nothing to do."""
    tensor = draft.tensor(picks[0])
    match picks[1] % 6:
        case 0:
            draft.method("contiguous", tensor)
        case 1:
            draft.method("to", tensor, torch.float32)
        case 2:
            draft.call(functional.dropout, tensor, 0.5, False)
        case 3:
            draft.call(operator.pos, tensor)
        case 4:
            draft.method("__pos__", tensor)
        case _:
            draft.call(torch.flatten, tensor)


def view_of(draft: Draft, tensor: Node, pick: int) -> Node:
    """A view of `tensor` of the kind that `pick` says."""
    match pick % 9:
        case 0:
            return draft.call(operator.getitem, tensor, slice(0, 2))
        case 1:
            return draft.method("view", tensor, -1)
        case 2:
            return draft.call(torch.transpose, tensor, 0, -1)
        case 3:
            return draft.call(operator.getitem, tensor, (Ellipsis, 1))
        case 4:
            return draft.method("select", tensor, 0, 1)
        case 5:
            return draft.method("unsqueeze", tensor, 0)
        case 6:
            return draft.call(aten.view.default, tensor, [-1, 2])
        case 7:
            return draft.call(torch.narrow, tensor, 0, 0, 2)
        case _:
            return draft.method("expand_as", tensor, tensor)


VIEWS: Mapping[str, Callable[[Draft, Picks], None]] = {
    "views.view": view,
    "views.view_of_view": view_of_view,
    "views.detached": detached,
    "views.perhaps_alias": perhaps_alias,
}
