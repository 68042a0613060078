"""Steps that put something to a test inside nested modes: what only writes or draws, what crosses a border, bodies."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from partita import hops
from partita._torch import torch_operators
from partita._torch.toggles import ENTER_INFERENCE, IS_GRAD_ENABLED
from partita.testing.draft import Draft
from partita.testing.mode_bodies import MODE_BODIES
from partita.testing.recipe import Picks
from partita.testing.state import BUFFERS
from partita.testing.steps.nests import enter_some, has_called, leave_some
from partita.testing.steps.views import view_of

__all__ = ["NESTED_WORK"]


def only(draft: Draft, picks: Picks) -> None:
    """A block of one operator whose result nobody need read: a write, a random draw, or a product."""
    enter_some(draft, (picks[1], picks[2], picks[3], picks[0]))
    match picks[0] % 3:
        case 0:
            buffer = draft.attribute(BUFFERS[picks[1] % len(BUFFERS)])
            if draft.may_write(draft.values[buffer]):
                draft.method("mul_", buffer, 0.5)
        case 1:
            draft.call(torch.rand_like, draft.matrix(picks[2]))
        case _:
            draft.call(torch.matmul, draft.matrix(picks[2]), draft.method("t", draft.matrix(picks[3])))
    leave_some(draft, picks)


def weight(draft: Draft, picks: Picks) -> None:
    """A layer whose weight autocast casts, and keeps while the outermost block is open."""
    matrix = draft.matrix(picks[0])
    draft.call(functional.linear, matrix, draft.attribute(("weight", "tied.weight")[picks[1] % 2]))


def border(draft: Draft, picks: Picks) -> None:
    """A list, a size or a view that is made on one side of a switch and used on the other."""
    matrix = draft.matrix(picks[0])
    switch = leave_some if picks[1] % 2 and draft.open else enter_some
    match picks[2] % 4:
        case 0:
            pieces = draft.call(torch.chunk, matrix, 2, 1)
            switch(draft, picks)
            draft.call(torch.cat, pieces, 1)
            draft.call(operator.getitem, pieces, 1)
        case 1:
            rows, columns = draft.method("size", matrix, 0), draft.method("size", matrix, 1)
            switch(draft, picks)
            draft.call(torch.reshape, matrix, (columns, rows))
        case 2:
            copied = draft.method("clone", matrix)
            view = view_of(draft, copied, picks[3])
            switch(draft, picks)
            draft.method("mul_", view, 0.5)
            draft.call(torch.sin, copied)
        case _:
            pair = draft.call(torch.sort, matrix, 1)
            switch(draft, picks)
            draft.call(torch.gather, matrix, 1, draft.call(operator.getitem, pair, 1))


def body(draft: Draft, picks: Picks) -> None:
    """An operator whose body switches modes itself; it may be the same body as elsewhere."""
    if picks[2] % 8 >= 6:
        branch(draft, picks)
        return
    operand, read = draft.matrix(picks[0]), draft.attribute(_body_name(draft, picks[1]))
    match picks[2] % 8:
        case 0:
            results = draft.call(hops.wrap, read, operand)
        case 1:
            results = draft.call(hops.call, read, operand)
        case 2:
            results = draft.call(torch_operators.WRAP, read, operand)
        case 3:
            results = draft.call(hops.wrap_with_set_grad_enabled, picks[3] % 2 == 0, read, operand)
        case 4:
            flag = picks[3] % 2 == 0
            results = draft.call(torch_operators.WRAP_WITH_AUTOCAST, "cpu", torch.bfloat16, flag, None, read, operand)
        case 5 if has_called(draft, ENTER_INFERENCE):
            results = draft.call(hops.wrap_with_inference_mode, picks[3] % 2 == 0, read, operand)
        case _:
            results = draft.call(torch_operators.WRAP_WITH_SET_GRAD_ENABLED, picks[3] % 2 == 0, read, operand)
    draft.call(operator.getitem, results, 0)


def branch(draft: Draft, picks: Picks) -> None:
    """Two bodies of which one runs; torch traces branches anew where they need gradients, so these need none."""
    operand = draft.method("detach", draft.matrix(picks[0]))
    positive = draft.call(torch.gt, draft.method("sum", operand), 0.0)
    bodies = [draft.attribute(_body_name(draft, pick)) for pick in (picks[1], picks[3])]
    results = draft.call(torch.ops.higher_order.cond, positive, *bodies, (operand,))
    draft.call(operator.getitem, results, 0)


def _body_name(draft: Draft, pick: int) -> str:
    """A body that may run here: some programs have no inference block, some take gradients to be on."""
    used = draft.state.used
    unfit = set() if has_called(draft, ENTER_INFERENCE) else {"inference_body"}
    if "on_body" in used:
        unfit.update(_ASKING)
    if not torch.is_grad_enabled() or has_called(draft, IS_GRAD_ENABLED) or any(name in used for name in _ASKING):
        unfit.add("on_body")
    names = [name for name in MODE_BODIES if name not in unfit]
    return names[pick % len(names)]


#: Bodies that ask for the grad mode, so that a program with them means something under callers without gradients too.
_ASKING = ("off_body", "mixed_body", "nest_body")

NESTED_WORK: Mapping[str, Callable[[Draft, Picks], None]] = {
    "nests.only": only,
    "nests.weight": weight,
    "nests.border": border,
    "nests.body": body,
}
