"""Steps whose values are lists, tuples and dicts: indexed, sliced, nested, used whole, or mutated."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from partita.testing.generator.draft import Draft, Steps
from partita.testing.generator.recipe import Picks
from partita.testing.generator.state import branches, replace_first

aten = torch.ops.aten
_getitem = operator.getitem


def parts(draft: Draft, picks: Picks) -> None:
    """A list of which one or two items are used."""
    pieces = _pieces(draft, picks)
    draft.call(_getitem, pieces, picks[2] % 2)
    if picks[3] % 2:
        draft.call(_getitem, pieces, -1)


def whole(draft: Draft, picks: Picks) -> None:
    """A list used whole, or a slice of it."""
    pieces = _pieces(draft, picks)
    if picks[2] % 2:
        pieces = draft.call(_getitem, pieces, slice(0, 2))
    draft.call(torch.cat, pieces, picks[1] % 2)


def joined(draft: Draft, picks: Picks) -> None:
    """A list made of nodes, in an argument."""
    left = draft.tensor(picks[0])
    right = draft.like(left, picks[1])
    joined = draft.call((torch.cat, torch.stack)[picks[2] % 2], [left, right], dim=0)
    draft.call(_getitem, joined, 0)


def extremes(draft: Draft, picks: Picks) -> None:
    """A named tuple of values and indices, read by place and by name."""
    matrix = draft.matrix(picks[0])
    pair = draft.call((torch.max, torch.sort, torch.min)[picks[1] % 3], matrix, 1)
    values = draft.call(getattr, pair, "values") if picks[2] % 2 else draft.call(_getitem, pair, 0)
    if picks[3] % 2:
        draft.call(torch.add, values, 0.5)


def largest(draft: Draft, picks: Picks) -> None:
    matrix = draft.matrix(picks[0])
    pair = draft.call((torch.topk, aten.topk.default)[picks[1] % 2], matrix, 2)
    indices = draft.call(_getitem, pair, 1)
    draft.call(torch.gather, matrix, 1, indices)
    if picks[2] % 2:
        draft.call(_getitem, pair, 0)


def normalised(draft: Draft, picks: Picks) -> None:
    """An overload of three results of which some are unused."""
    results = draft.call(aten.native_layer_norm.default, draft.matrix(picks[0]), [6], None, None, 1e-5)
    draft.call(_getitem, results, 0)
    if picks[1] % 2:
        draft.call(_getitem, results, 1)


def deep(draft: Draft, picks: Picks) -> None:
    """A tuple in a tuple, or a dict in one, from a module."""
    matrix = draft.matrix(picks[0])
    if picks[1] % 2:
        inner = draft.call(_getitem, draft.module("fork", matrix, scale=0.25), 1)
        draft.call(_getitem, inner, ("left", "right")[picks[2] % 2])
        return
    inner = draft.call(_getitem, draft.module("lstm", matrix), 1)
    draft.call(_getitem, inner, picks[2] % 2)


def _pieces(draft: Draft, picks: Picks) -> Node:
    dim = picks[1] % 2
    forms: tuple[tuple[Any, tuple[Any, ...], dict[str, int]], ...] = (
        (torch.chunk, (2, dim), {}),
        ("split", ([1, 3] if dim == 0 else [2, 4], dim), {}),
        (torch.unbind, (dim,), {}),
        (aten.split.Tensor, (2, dim), {}),
        ("chunk", (2,), {"dim": dim}),
        (torch.unsafe_chunk, (2, dim), {}),
    )
    target, rest, named = forms[picks[1] // 2 % len(forms)]
    return draft.apply(target, draft.matrix(picks[0]), *rest, **named)


CONTAINERS: Steps = {
    "containers.parts": parts,
    "containers.whole": whole,
    "containers.joined": joined,
    "containers.extremes": extremes,
    "containers.largest": largest,
    "containers.normalised": normalised,
    "containers.deep": deep,
}


def replaced(draft: Draft, picks: Picks) -> None:
    """An item read, replaced, and read again."""
    pieces = _list(draft, picks)
    if picks[2] % 2:
        draft.call(_getitem, pieces, 0)
    # In a graph module this node has the new item, in an interpreter None, so no step may use it.
    draft.hide(draft.call(operator.setitem, pieces, 0, draft.tensor(picks[3])))
    draft.call(_getitem, pieces, picks[2] // 2 % 2)


def replaced_elsewhere(draft: Draft, picks: Picks) -> None:
    """An item replaced by a call that does not look like a mutation: an unknown function or a body."""
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
    """An item removed from the list, and the one that is there afterwards."""
    pieces = _list(draft, picks)
    draft.method("pop", pieces, (-1, 0)[picks[2] % 2])
    draft.call(_getitem, pieces, (-1, 0)[picks[2] % 2])


def added(draft: Draft, picks: Picks) -> None:
    """Two lists concatenated, or the first extended by the second."""
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
        draft.hide(draft.call(operator.setitem, entries, "whole", draft.tensor(picks[2])))
    draft.call(_getitem, entries, "whole")


def _list(draft: Draft, picks: Picks) -> Node:
    """A list of at least two views; torch's functions return tuples, its overloads lists."""
    dim = picks[1] % 2
    forms = ((aten.split.Tensor, 2, dim), (aten.chunk.default, 2, dim), (aten.unbind.int, dim))
    target, *rest = forms[picks[1] // 2 % len(forms)]
    return draft.call(target, draft.matrix(picks[0]), *rest)


LISTS: Steps = {
    "lists.replaced": replaced,
    "lists.replaced_elsewhere": replaced_elsewhere,
    "lists.appended": appended,
    "lists.popped": popped,
    "lists.added": added,
    "lists.keyed": keyed,
}
