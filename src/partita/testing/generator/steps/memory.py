"""Steps that mutate tensors (in-place, through views, by `out=`, inputs, buffers), and steps that make views."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional

from partita.testing.generator.draft import Draft, Steps, UnfitError, on_default_device
from partita.testing.generator.recipe import Picks
from partita.testing.generator.state import BUFFERS

aten = torch.ops.aten


def method(draft: Draft, picks: Picks) -> None:
    names = (("add_", 0.25), ("mul_", 0.5), ("relu_",), ("clamp_", -0.5, 0.5), ("zero_",), ("fill_", 0.25))
    name, *rest = names[picks[1] % len(names)]
    draft.method(str(name), draft.mutable(picks[0]), *rest)


def method_with(draft: Draft, picks: Picks) -> None:
    mutated = draft.mutable(picks[0])
    draft.method(("add_", "sub_", "mul_", "copy_")[picks[2] % 4], mutated, _partner(draft, mutated, picks[1]))


def function(draft: Draft, picks: Picks) -> None:
    mutated = draft.mutable(picks[0])
    match picks[1] % 3:
        case 0:
            draft.call(torch.relu_, mutated)
        case 1:
            draft.call(functional.relu, mutated, inplace=True)
        case _:
            draft.call(functional.hardtanh, mutated, -0.5, 0.5, True)


def overload(draft: Draft, picks: Picks) -> None:
    mutated = draft.mutable(picks[0])
    targets = (aten.add_.Tensor, aten.copy_.default, aten.mul_.Tensor)
    draft.call(targets[picks[2] % 3], mutated, _partner(draft, mutated, picks[1]))


def operator_form(draft: Draft, picks: Picks) -> None:
    mutated = draft.mutable(picks[0])
    draft.call((operator.iadd, operator.imul, operator.isub)[picks[2] % 3], mutated, _partner(draft, mutated, picks[1]))


def out(draft: Draft, picks: Picks) -> None:
    """A result mutated to an existing tensor, which autograd forbids where it would have to record."""
    mutated = draft.mutable(picks[0])
    left, right = _partner(draft, mutated, picks[1]), _partner(draft, mutated, picks[2])
    left, right = _without_history(draft, left), _without_history(draft, right)
    draft.call((torch.add, torch.mul)[picks[3] % 2], left, right, out=mutated)


def setitem(draft: Draft, picks: Picks) -> None:
    mutated = draft.mutable(picks[0])
    key = (0, slice(0, 2), (Ellipsis, 0), slice(None, None, 2))[picks[1] % 4]
    value = 0.25 if picks[2] % 2 else draft.call(operator.getitem, _partner(draft, mutated, picks[3]), key)
    # In a graph module this node has the mutated tensor, in an interpreter None, so no step may use it.
    draft.hide(draft.call(operator.setitem, mutated, key, value))


def through_view(draft: Draft, picks: Picks) -> None:
    """Mutation of a view, which mutates its base too."""
    view = view_of(draft, draft.mutable(picks[0]), picks[1])
    draft.method(("mul_", "add_")[picks[2] % 2], view, 0.5)


def through_two_views(draft: Draft, picks: Picks) -> None:
    """Mutation of a view of a view, by `relu_` or by another tensor."""
    view = view_of(draft, view_of(draft, draft.mutable(picks[0]), picks[1]), picks[2])
    if picks[3] % 2:
        draft.method("relu_", view)
    else:
        draft.method("add_", view, _partner(draft, view, picks[3]))


def indexed(draft: Draft, picks: Picks) -> None:
    """Mutation of the rows that a tensor of indices selects."""
    mutated = draft.mutable(picks[0])
    rows = draft.call(torch.tensor, [0, 2] if picks[1] % 2 else [1, 0], **on_default_device())
    values = draft.call(operator.getitem, _partner(draft, mutated, picks[2]), slice(0, 2))
    _check_apart(draft, mutated, values)
    match picks[3] % 3:
        case 0:
            draft.call(aten.index_put_.default, mutated, [rows], values, picks[1] % 4 > 1)
        case 1:
            draft.method("index_add_", mutated, 0, rows, values)
        case _:
            draft.method("index_fill_", mutated, 0, rows, 0.25)


def masked(draft: Draft, picks: Picks) -> None:
    """Mutation of the elements that a comparison selects."""
    mutated = draft.mutable(picks[0])
    mask = draft.call(torch.gt, draft.method("detach", draft.like(mutated, picks[1])), 0.1)
    draft.method("masked_fill_", mutated, mask, 0.25)


def through_detached(draft: Draft, picks: Picks) -> None:
    draft.method("mul_", draft.method("detach", draft.mutable(picks[0])), 0.5)


def buffer(draft: Draft, picks: Picks) -> None:
    mutated = draft.attribute(BUFFERS[picks[0] % len(BUFFERS)])
    if not draft.may_mutate(draft.values[mutated]):
        raise UnfitError(f"{mutated} is saved for backward")
    if picks[2] % 2:
        draft.method("mul_", mutated, 0.5)
    else:
        draft.method("copy_", mutated, _partner(draft, mutated, picks[1]))


def input_(draft: Draft, picks: Picks) -> None:
    """Mutation that the caller sees; autograd forbids it on inputs that require gradients."""
    free = draft.tensors(lambda value: not value.requires_grad and draft.may_mutate(value))
    mutated = draft.choose(picks[0], [node for node in free if node in draft.inputs])
    draft.method(("add_", "mul_")[picks[1] % 2], mutated, 0.25)


def foreach(draft: Draft, picks: Picks) -> None:
    """Two tensors mutated by one call; where they overlap, autograd and traces lose one mutation (torch 2.13)."""
    targets = (aten._foreach_add_.Scalar, aten._foreach_mul_.Scalar)
    mutated = [draft.mutable(pick) for pick in picks[:2]]
    _check_apart(draft, *mutated)
    draft.call(targets[picks[2] % 2], mutated, 0.5)


def metadata(draft: Draft, picks: Picks) -> None:
    """In-place change of a tensor's shape."""
    copied = draft.method("clone", draft.matrix(picks[0]))
    draft.method(("t_", "unsqueeze_")[picks[1] % 2], copied, *((), (0,))[picks[1] % 2])


def _partner(draft: Draft, mutated: Node, pick: int) -> Node:
    """A tensor to mutate `mutated` by; without history for state, else one call would reach into the next."""
    partner = draft.like(mutated, pick)
    if not _are_same(draft.values[mutated], draft.values[partner]):
        _check_apart(draft, mutated, partner)
    return _without_history(draft, partner) if draft.outlives_call(mutated) else partner


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are the same view of a storage, so that each element is combined with itself."""
    return (one.data_ptr(), one.stride(), one.dtype) == (other.data_ptr(), other.stride(), other.dtype)


def _check_apart(draft: Draft, mutated: Node, read: Node) -> None:
    """Refuses mutation of memory that is read too: the order is undefined, and torch detects only some cases."""
    one, other = draft.values[mutated], draft.values[read]
    if _bytes_of(one) & _bytes_of(other):
        raise UnfitError(f"{mutated} would be mutated while {read} is read, and they overlap")


def _bytes_of(value: Tensor) -> set[int]:
    """The addresses of a tensor's elements."""
    starts = {value.data_ptr()}
    for size, stride in zip(value.shape, value.stride(), strict=True):
        starts = {start + step * stride * value.element_size() for start in starts for step in range(size)}
    return {start + byte for start in starts for byte in range(value.element_size())}


def _without_history(draft: Draft, node: Node) -> Node:
    return draft.method("detach", node) if draft.values[node].requires_grad else node


WRITES: Steps = {
    "mutations.method": method,
    "mutations.method_with": method_with,
    "mutations.function": function,
    "mutations.overload": overload,
    "mutations.operator": operator_form,
    "mutations.out": out,
    "mutations.setitem": setitem,
    "mutations.through_view": through_view,
    "mutations.through_detached": through_detached,
    "mutations.buffer": buffer,
    "mutations.input": input_,
    "mutations.foreach": foreach,
    "mutations.metadata": metadata,
}
CROSSING_WRITES: Steps = {
    "mutations.through_two_views": through_two_views,
    "mutations.indexed": indexed,
    "mutations.masked": masked,
}


def view_of_view(draft: Draft, picks: Picks) -> None:
    view_of(draft, view_of(draft, draft.tensor(picks[0]), picks[1]), picks[2])


def detached(draft: Draft, picks: Picks) -> None:
    tensor = draft.tensor(picks[0])
    draft.call(aten.detach.default, tensor) if picks[1] % 2 else draft.method("detach", tensor)


def perhaps_alias(draft: Draft, picks: Picks) -> None:
    """An operator that returns its operand when there is nothing to do."""
    forms: tuple[tuple[Any, ...], ...] = (
        ("contiguous",),
        ("to", torch.float32),
        (functional.dropout, 0.5, False),
        (operator.pos,),
        ("__pos__",),
        (torch.flatten,),
    )
    target, *rest = forms[picks[1] % len(forms)]
    draft.apply(target, draft.tensor(picks[0]), *rest)


def view_of(draft: Draft, tensor: Node, pick: int) -> Node:
    """A view of `tensor` of the kind that `pick` says."""
    views: tuple[tuple[Any, ...], ...] = (
        (operator.getitem, slice(0, 2)),
        ("view", -1),
        (torch.transpose, 0, -1),
        (operator.getitem, (Ellipsis, 1)),
        ("select", 0, 1),
        ("unsqueeze", 0),
        (aten.view.default, [-1, 2]),
        (torch.narrow, 0, 0, 2),
        ("expand_as", tensor),
    )
    target, *rest = views[pick % len(views)]
    return draft.apply(target, tensor, *rest)


VIEWS: Steps = {
    "views.view": lambda draft, picks: view_of(draft, draft.tensor(picks[0]), picks[1]),
    "views.view_of_view": view_of_view,
    "views.detached": detached,
    "views.perhaps_alias": perhaps_alias,
}
