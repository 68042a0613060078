"""Steps that write to lists and dicts themselves, so that it matters when an item is taken out of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch.fx import Node

from partita.testing.draft import Draft
from partita.testing.functions import branches, replace_first
from partita.testing.recipe import Picks

__all__ = ["LISTS"]

aten = torch.ops.aten
_getitem = operator.getitem


def replaced(draft: Draft, picks: Picks) -> None:
    """An item taken, replaced, and taken again."""
    pieces = _list(draft, picks)
    if picks[2] % 2:
        draft.call(_getitem, pieces, 0)
    # A graph module gives this node the new item, an interpreter None, so nobody may rely on either.
    draft.disown(draft.call(operator.setitem, pieces, 0, draft.tensor(picks[3])))
    draft.call(_getitem, pieces, picks[2] // 2 % 2)


def replaced_elsewhere(draft: Draft, picks: Picks) -> None:
    """An item replaced by somebody who does not look like a writer: an unknown function or a body."""
    pieces, other = _list(draft, picks), draft.tensor(picks[3])
    if picks[2] % 2:
        draft.module("replacing_body", pieces, other)
    else:
        draft.call(replace_first, pieces, other)
    draft.call(_getitem, pieces, picks[2] // 2 % 2)


def appended(draft: Draft, picks: Picks) -> None:
    pieces = _list(draft, picks)
    draft.method("append", pieces, draft.tensor(picks[2]))
    draft.call(_getitem, pieces, (-1, 0)[picks[3] % 2])


def popped(draft: Draft, picks: Picks) -> None:
    """An item that the list loses, and the one that takes its place."""
    pieces = _list(draft, picks)
    draft.method("pop", pieces, (-1, 0)[picks[2] % 2])
    draft.call(_getitem, pieces, (-1, 0)[picks[2] % 2])


def added(draft: Draft, picks: Picks) -> None:
    """Two lists put together, or the second put onto the first."""
    left, right = _list(draft, picks), _list(draft, (picks[2], picks[1], 0, 0))
    both = draft.call((operator.add, operator.iadd)[picks[3] % 2], left, right)
    draft.call(_getitem, both, -1)
    if picks[3] // 2 % 2:
        draft.call(_getitem, left, -1)


def keyed(draft: Draft, picks: Picks) -> None:
    """A dict whose entry is replaced."""
    entries = draft.call(branches, draft.tensor(picks[0]))
    if picks[1] % 2:
        draft.call(_getitem, entries, "whole")
    if picks[1] // 2 % 2:
        draft.method("update", entries, {"whole": draft.tensor(picks[2])})
    else:
        draft.disown(draft.call(operator.setitem, entries, "whole", draft.tensor(picks[2])))
    draft.call(_getitem, entries, "whole")


def _list(draft: Draft, picks: Picks) -> Node:
    """A list of at least two views; torch's functions give tuples, its overloads lists."""
    matrix, dim = draft.matrix(picks[0]), picks[1] % 2
    match picks[1] // 2 % 3:
        case 0:
            return draft.call(aten.split.Tensor, matrix, 2, dim)
        case 1:
            return draft.call(aten.chunk.default, matrix, 2, dim)
        case _:
            return draft.call(aten.unbind.int, matrix, dim)


LISTS: Mapping[str, Callable[[Draft, Picks], None]] = {
    "lists.replaced": replaced,
    "lists.replaced_elsewhere": replaced_elsewhere,
    "lists.appended": appended,
    "lists.popped": popped,
    "lists.added": added,
    "lists.keyed": keyed,
}
