"""Steps that switch grad, autocast and inference modes: paired, nested, interleaved, redundant, left open."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from partita._torch.toggles import ENTER_AUTOCAST, ENTER_INFERENCE, EXIT_AUTOCAST, EXIT_INFERENCE, SET_GRAD
from partita.testing.generator.draft import Draft, OpenBlock, UnfitError
from partita.testing.generator.recipe import Picks

__all__ = ["AUTOCAST", "GRAD", "INFERENCE", "close_modes"]


_DEEPEST = 3


def grad_off(draft: Draft, picks: Picks) -> None:
    draft.call(SET_GRAD, False)


def grad_on(draft: Draft, picks: Picks) -> None:
    draft.call(SET_GRAD, True)


def grad_block(draft: Draft, picks: Picks) -> None:
    """A block of one operator, closed again at once."""
    before = torch.is_grad_enabled()
    draft.call(SET_GRAD, picks[1] % 4 == 3)
    draft.call(torch.sin, draft.tensor(picks[0]))
    draft.call(SET_GRAD, before)


def grad_left_on(draft: Draft, picks: Picks) -> None:
    """A body that ends by switching grad on; where that changed anything, the program would be refused."""
    if not torch.is_grad_enabled():
        raise UnfitError("grad is off")
    draft.module("leaving_grad_on", draft.tensor(picks[0]))


def autocast_on(draft: Draft, picks: Picks) -> None:
    _enter(draft, ENTER_AUTOCAST, EXIT_AUTOCAST, "cpu", torch.bfloat16, True, (True, False, None)[picks[1] % 3])


def autocast_off(draft: Draft, picks: Picks) -> None:
    _enter(draft, ENTER_AUTOCAST, EXIT_AUTOCAST, "cpu", torch.bfloat16, False, None)


def autocast_elsewhere(draft: Draft, picks: Picks) -> None:
    """A block for a second device, which changes nothing here; torch 2.13 warns of an absent cuda, but of no xpu."""
    _enter(draft, ENTER_AUTOCAST, EXIT_AUTOCAST, "xpu", torch.float16, picks[1] % 4 != 3, None)


def autocast_block(draft: Draft, picks: Picks) -> None:
    """A block of one product, the kind of operator that autocast changes."""
    matrix = draft.matrix(picks[0])
    _enter(draft, ENTER_AUTOCAST, EXIT_AUTOCAST, "cpu", torch.bfloat16, picks[1] % 4 != 3, None)
    draft.call(torch.matmul, matrix, draft.method("t", draft.matrix(picks[2])))
    _leave(draft, EXIT_AUTOCAST)


def autocast_exit(draft: Draft, picks: Picks) -> None:
    _leave(draft, EXIT_AUTOCAST)


def inference_on(draft: Draft, picks: Picks) -> None:
    _enter(draft, ENTER_INFERENCE, EXIT_INFERENCE, picks[1] % 4 != 3)


def inference_block(draft: Draft, picks: Picks) -> None:
    tensor = draft.tensor(picks[0])
    _enter(draft, ENTER_INFERENCE, EXIT_INFERENCE, True)
    draft.call(torch.cos, tensor)
    _leave(draft, EXIT_INFERENCE)


def inference_exit(draft: Draft, picks: Picks) -> None:
    _leave(draft, EXIT_INFERENCE)


def close_modes(draft: Draft, *, restores_grad: bool) -> None:
    """Leaves what is open; grad may stay off, as in a program cut out of a larger one."""
    while draft.open:
        _leave(draft, draft.open[-1].leave)
    if restores_grad and not torch.is_grad_enabled():
        draft.call(SET_GRAD, True)


def _enter(draft: Draft, enter: Callable[..., object], leave: Callable[..., object], *options: object) -> None:
    if len(draft.open) >= _DEEPEST:
        raise UnfitError("enough modes are open")
    draft.open.append(OpenBlock(leave, draft.call(enter, *options)))


def _leave(draft: Draft, leave: Callable[..., object]) -> None:
    # Torch keeps autocast in what an inference block restores when left, so the two may nest but never cross.
    if not draft.open or draft.open[-1].leave is not leave:
        raise UnfitError("another mode was entered last")
    draft.call(leave, draft.open[-1].handle)
    draft.open.pop()


GRAD: Mapping[str, Callable[[Draft, Picks], None]] = {
    "grad.off": grad_off,
    "grad.on": grad_on,
    "grad.block": grad_block,
    "grad.left_on": grad_left_on,
}
AUTOCAST: Mapping[str, Callable[[Draft, Picks], None]] = {
    "autocast.on": autocast_on,
    "autocast.off": autocast_off,
    "autocast.elsewhere": autocast_elsewhere,
    "autocast.block": autocast_block,
    "autocast.exit": autocast_exit,
}
INFERENCE: Mapping[str, Callable[[Draft, Picks], None]] = {
    "inference.on": inference_on,
    "inference.block": inference_block,
    "inference.exit": inference_exit,
}
