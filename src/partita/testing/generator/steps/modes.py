"""Steps that switch grad, autocast and inference modes: paired, nested, interleaved, redundant or left open."""

from __future__ import annotations

from collections.abc import Callable

import torch

from partita._torch.toggles import ENTER_AUTOCAST, ENTER_INFERENCE, EXIT_AUTOCAST, EXIT_INFERENCE, SET_GRAD
from partita.testing.generator.draft import Draft, Steps, UnfitError
from partita.testing.generator.recipe import Picks

_DEEPEST = 3


def grad_block(draft: Draft, picks: Picks) -> None:
    """A block of one operator, closed again at once."""
    before = torch.is_grad_enabled()
    draft.call(SET_GRAD, picks[1] % 4 == 3)
    draft.call(torch.sin, draft.tensor(picks[0]))
    draft.call(SET_GRAD, before)


def grad_left_on(draft: Draft, picks: Picks) -> None:
    """A body that ends by enabling grad; where that changed anything, the program would be refused."""
    if not torch.is_grad_enabled():
        raise UnfitError("grad is off")
    draft.module("leaving_grad_on", draft.tensor(picks[0]))


def autocast_on(draft: Draft, picks: Picks) -> None:
    draft.enter(ENTER_AUTOCAST, "cpu", torch.bfloat16, True, (True, False, None)[picks[1] % 3], deepest=_DEEPEST)


def autocast_off(draft: Draft, picks: Picks) -> None:
    draft.enter(ENTER_AUTOCAST, "cpu", torch.bfloat16, False, None, deepest=_DEEPEST)


def autocast_elsewhere(draft: Draft, picks: Picks) -> None:
    """A block for a second device, which changes nothing here; torch 2.13 warns of an absent cuda, but of no xpu."""
    draft.enter(ENTER_AUTOCAST, "xpu", torch.float16, picks[1] % 4 != 3, None, deepest=_DEEPEST)


def autocast_block(draft: Draft, picks: Picks) -> None:
    """A block of one product, the kind of operator that autocast changes."""
    matrix = draft.matrix(picks[0])
    draft.enter(ENTER_AUTOCAST, "cpu", torch.bfloat16, picks[1] % 4 != 3, None, deepest=_DEEPEST)
    draft.call(torch.matmul, matrix, draft.method("t", draft.matrix(picks[2])))
    _leave(draft, EXIT_AUTOCAST)


def inference_block(draft: Draft, picks: Picks) -> None:
    tensor = draft.tensor(picks[0])
    draft.enter(ENTER_INFERENCE, True, deepest=_DEEPEST)
    draft.call(torch.cos, tensor)
    _leave(draft, EXIT_INFERENCE)


def close_modes(draft: Draft, *, restores_grad: bool) -> None:
    """Exits the open blocks; grad may stay off, as in a part of a larger program."""
    while draft.open:
        _leave(draft, draft.open[-1].leave)
    if restores_grad and not torch.is_grad_enabled():
        draft.call(SET_GRAD, True)


def _leave(draft: Draft, leave: Callable[..., object]) -> None:
    # An inference block restores autocast too when it is exited, so the two may nest but never cross.
    if not draft.open or draft.open[-1].leave is not leave:
        raise UnfitError("another mode was entered last")
    draft.call(leave, draft.open[-1].handle)
    draft.open.pop()


GRAD: Steps = {
    "grad.off": lambda draft, picks: draft.call(SET_GRAD, False),
    "grad.on": lambda draft, picks: draft.call(SET_GRAD, True),
    "grad.block": grad_block,
    "grad.left_on": grad_left_on,
}
AUTOCAST: Steps = {
    "autocast.on": autocast_on,
    "autocast.off": autocast_off,
    "autocast.elsewhere": autocast_elsewhere,
    "autocast.block": autocast_block,
    "autocast.exit": lambda draft, picks: _leave(draft, EXIT_AUTOCAST),
}
INFERENCE: Steps = {
    "inference.on": lambda draft, picks: draft.enter(ENTER_INFERENCE, picks[1] % 4 != 3, deepest=_DEEPEST),
    "inference.block": inference_block,
    "inference.exit": lambda draft, picks: _leave(draft, EXIT_INFERENCE),
}
