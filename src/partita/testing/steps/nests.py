"""Steps of nested modes: blocks in blocks, crossing, left open, equal, or changing nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from partita._torch.toggles import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    IS_GRAD_ENABLED,
    SET_GRAD,
)
from partita.testing.draft import Draft, OpenBlock, UnfitError
from partita.testing.recipe import LARGEST_PICK, Picks

__all__ = ["NESTS", "enter_some", "has_called", "leave_some"]

_DEEPEST = 8
#: torch 2.13 warns of an absent cuda, but of none of these.
_DEVICES = ("cpu", "cpu", "cpu", "xpu", "hpu")
_DTYPES = (torch.bfloat16, None, torch.float16, torch.bfloat16)


def grad(draft: Draft, picks: Picks) -> None:
    """A block that ends by a constant, the mode that was there when the program was traced."""
    _check_depth(draft)
    found = torch.is_grad_enabled()
    _set_grad(draft, (False, not found, found, False)[picks[1] % 4], picks[2])
    draft.open.append(OpenBlock(SET_GRAD, found))


def asked(draft: Draft, picks: Picks) -> None:
    """A block that asks for the mode first and puts that back, or what an earlier block has asked for."""
    _check_depth(draft)
    if "on_body" in draft.state.used:
        raise UnfitError("a body of the program takes gradients to be on")
    found = draft.call(IS_GRAD_ENABLED)
    _set_grad(draft, (False, True, found, False)[picks[1] % 4], picks[2])
    known = draft.graph.find_nodes(op="call_function", target=IS_GRAD_ENABLED)
    draft.open.append(OpenBlock(SET_GRAD, known[picks[0] % len(known)] if picks[3] % 8 == 7 else found))


def toggle(draft: Draft, picks: Picks) -> None:
    """A switch that belongs to no block and may change nothing."""
    found = torch.is_grad_enabled()
    _set_grad(draft, (True, False, found)[picks[1] % 3], picks[2])


def autocast(draft: Draft, picks: Picks) -> None:
    """A block with all of its arguments, or the first few."""
    enabled, cache = picks[2] % 4 != 3, (None, True, False, None)[picks[2] // 4]
    options = (_DEVICES[picks[0] % 5], _DTYPES[picks[1] % 4], enabled, cache)
    _enter(draft, ENTER_AUTOCAST, EXIT_AUTOCAST, *_keeping_one_type(options[: 1 + (picks[3] + 3) % 4]))


def inference(draft: Draft, picks: Picks) -> None:
    mode = picks[1] % 4 != 3
    if picks[2] % 4 == 3:
        _enter(draft, ENTER_INFERENCE, EXIT_INFERENCE, mode=mode)
    else:
        _enter(draft, ENTER_INFERENCE, EXIT_INFERENCE, mode)


def again(draft: Draft, picks: Picks) -> None:
    """A block like the one that is open already, or like any that ever was."""
    entered = [node for target in _EXITS for node in draft.graph.find_nodes(op="call_function", target=target)]
    inside = [block.handle for block in draft.open if isinstance(block.handle, Node) and block.handle in entered]
    model = inside[-1] if inside and picks[1] % 4 != 3 else draft.choose(picks[0], entered)
    options = _keeping_one_type(model.args) if model.target is ENTER_AUTOCAST else model.args
    _enter(draft, model.target, _EXITS[model.target], *options, **model.kwargs)


def leave(draft: Draft, picks: Picks) -> None:
    _leave(draft, len(draft.open) - 1, picks[1])


def cross(draft: Draft, picks: Picks) -> None:
    """Leaves a block while others that were entered in it are open.

    Leaving an inference block puts back autocast as it was, so one that crosses it is refused, and is rare here.
    """
    outer = [at for at, block in enumerate(draft.open[:-1]) if block.leave is not EXIT_INFERENCE]
    inferring = [at for at, block in enumerate(draft.open) if block.leave is EXIT_INFERENCE]
    if picks[3] != LARGEST_PICK:
        outer = [at for at in outer if not inferring or at > inferring[-1]]
    if not outer:
        raise UnfitError("no other block is open")
    _leave(draft, outer[picks[0] % len(outer)], picks[1])


def forget(draft: Draft, picks: Picks) -> None:
    """The innermost block stays open, as far as the program is concerned."""
    if not draft.open or any(block.leave is EXIT_INFERENCE for block in draft.open):
        raise UnfitError("an inference block has to be left")
    draft.open.pop()


def empty(draft: Draft, picks: Picks) -> None:
    """A block with nothing in it, or an inference block that ends at once since nobody keeps its handle."""
    if picks[1] % 4 == 3 and has_called(draft, ENTER_INFERENCE):
        draft.disown(draft.call(ENTER_INFERENCE, True))
        return
    enter_some(draft, picks)
    _leave(draft, len(draft.open) - 1, picks[2])


def enter_some(draft: Draft, picks: Picks) -> None:
    """Enters a block of a kind that the program has already: some programs have constants, or no inference, only."""
    grad_block = asked if has_called(draft, IS_GRAD_ENABLED) else grad
    other = inference if has_called(draft, ENTER_INFERENCE) else autocast
    (autocast, grad_block, grad_block, other)[picks[0] % 4](draft, picks)


def has_called(draft: Draft, target: Callable[..., object]) -> bool:
    """Whether the program calls this function anywhere."""
    return bool(draft.graph.find_nodes(op="call_function", target=target, sort=False))


def leave_some(draft: Draft, picks: Picks) -> None:
    """Leaves the innermost block."""
    leave(draft, picks)


def _check_depth(draft: Draft) -> None:
    if len(draft.open) >= _DEEPEST:
        raise UnfitError("enough blocks are open")


def _set_grad(draft: Draft, wanted: Node | bool, pick: int) -> None:  # noqa: FBT001
    if pick % 8 == 7:
        draft.call(SET_GRAD, enabled=wanted)
    else:
        draft.call(SET_GRAD, wanted)


def _enter(draft: Draft, enter: Any, leave: Callable[[Any], object], *options: Any, **named: Any) -> None:
    _check_depth(draft)
    draft.open.append(OpenBlock(leave, draft.call(enter, *options, **named)))


def _keeping_one_type(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a block, which keeps no weights if it casts to half precision.

    Torch 2.13 looks a cast weight up without asking for its type, so where two types are kept it matters when exactly
    the outermost block is left: what crosses it means nothing then.
    """
    device, dtype, enabled, cache = options + (None, None, True, None)[len(options) :]
    found = torch.get_autocast_dtype(device) if dtype is None else dtype
    keeps_half = cache is not False and found is torch.float16 and device == "cpu"
    return (device, dtype, enabled, False) if keeps_half else options


def _leave(draft: Draft, at: int, pick: int) -> None:
    if not draft.open:
        raise UnfitError("no block is open")
    block = draft.open.pop(at)
    if pick % 8 == 7:
        draft.call(block.leave, **{"enabled" if block.leave is SET_GRAD else "mode": block.handle})
    else:
        draft.call(block.leave, block.handle)


_EXITS: Mapping[Any, Callable[[Any], object]] = {ENTER_AUTOCAST: EXIT_AUTOCAST, ENTER_INFERENCE: EXIT_INFERENCE}

NESTS: Mapping[str, Callable[[Draft, Picks], None]] = {
    "nests.grad": grad,
    "nests.asked": asked,
    "nests.toggle": toggle,
    "nests.autocast": autocast,
    "nests.inference": inference,
    "nests.again": again,
    "nests.leave": leave,
    "nests.cross": cross,
    "nests.forget": forget,
    "nests.empty": empty,
}
