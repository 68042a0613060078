"""Steps that switch grad, autocast and inference modes: paired, nested, interleaved, redundant or left open."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional

from partita import hops
from partita._torch import operator_schemas as torch_operators
from partita._torch.toggles import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    IS_GRAD_ENABLED,
    SET_GRAD,
)
from partita.testing.generator.draft import EXITS, Draft, OpenBlock, Steps, UnfitError
from partita.testing.generator.mode_bodies import MODE_BODIES
from partita.testing.generator.recipe import LARGEST_PICK, Picks
from partita.testing.generator.state import BUFFERS
from partita.testing.generator.steps.memory import view_of

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


_DEEPEST_NEST = 8
#: torch 2.13 warns of an absent cuda, but of none of these.
_DEVICES = ("cpu", "cpu", "cpu", "xpu", "hpu")
_DTYPES = (torch.bfloat16, None, torch.float16, torch.bfloat16)


def grad(draft: Draft, picks: Picks) -> None:
    """A block that ends by a constant, the grad mode at trace time."""
    _check_depth(draft)
    found = torch.is_grad_enabled()
    _set_grad(draft, (False, not found, found, False)[picks[1] % 4], picks[2])
    draft.open.append(OpenBlock(SET_GRAD, found))


def queried(draft: Draft, picks: Picks) -> None:
    """A block that queries the grad mode first and restores it, or restores what an earlier block has queried."""
    _check_depth(draft)
    if "on_body" in draft.state.used:
        raise UnfitError("a body of the program assumes that gradients are on")
    found = draft.call(IS_GRAD_ENABLED)
    _set_grad(draft, (False, True, found, False)[picks[1] % 4], picks[2])
    known = draft.graph.find_nodes(op="call_function", target=IS_GRAD_ENABLED)
    draft.open.append(OpenBlock(SET_GRAD, known[picks[0] % len(known)] if picks[3] % 8 == 7 else found))


def toggle(draft: Draft, picks: Picks) -> None:
    """A toggle that belongs to no block and may be redundant."""
    found = torch.is_grad_enabled()
    _set_grad(draft, (True, False, found)[picks[1] % 3], picks[2])


def autocast(draft: Draft, picks: Picks) -> None:
    """A block with all of its arguments, or the first few."""
    enabled, cache = picks[2] % 4 != 3, (None, True, False, None)[picks[2] // 4]
    options = (_DEVICES[picks[0] % 5], _DTYPES[picks[1] % 4], enabled, cache)
    draft.enter(ENTER_AUTOCAST, *_caching_one_dtype(options[: 1 + (picks[3] + 3) % 4]), deepest=_DEEPEST_NEST)


def inference(draft: Draft, picks: Picks) -> None:
    mode = picks[1] % 4 != 3
    if picks[2] % 4 == 3:
        draft.enter(ENTER_INFERENCE, mode=mode, deepest=_DEEPEST_NEST)
    else:
        draft.enter(ENTER_INFERENCE, mode, deepest=_DEEPEST_NEST)


def again(draft: Draft, picks: Picks) -> None:
    """A block like the one that is open already, or like any that ever was."""
    entered = [node for target in EXITS for node in draft.graph.find_nodes(op="call_function", target=target)]
    inside = [block.handle for block in draft.open if isinstance(block.handle, Node) and block.handle in entered]
    model = inside[-1] if inside and picks[1] % 4 != 3 else draft.choose(picks[0], entered)
    options = _caching_one_dtype(model.args) if model.target is ENTER_AUTOCAST else model.args
    draft.enter(model.target, *options, **model.kwargs, deepest=_DEEPEST_NEST)


def leave(draft: Draft, picks: Picks) -> None:
    """Exits the innermost block."""
    _leave_at(draft, len(draft.open) - 1, picks[1])


def cross(draft: Draft, picks: Picks) -> None:
    """Exits a block while others that were entered in it are open.

    Exiting an inference block restores autocast too, so a block that crosses it is refused, and is rare here.
    """
    outer = [at for at, block in enumerate(draft.open[:-1]) if block.leave is not EXIT_INFERENCE]
    inferring = [at for at, block in enumerate(draft.open) if block.leave is EXIT_INFERENCE]
    if picks[3] != LARGEST_PICK:
        outer = [at for at in outer if not inferring or at > inferring[-1]]
    if not outer:
        raise UnfitError("no other block is open")
    _leave_at(draft, outer[picks[0] % len(outer)], picks[1])


def forget(draft: Draft, picks: Picks) -> None:
    """The innermost block stays open: no later step exits it."""
    if not draft.open or any(block.leave is EXIT_INFERENCE for block in draft.open):
        raise UnfitError("an inference block has to be left")
    draft.open.pop()


def empty(draft: Draft, picks: Picks) -> None:
    """An empty block, or an inference block that ends at once since its handle is unused."""
    if picks[1] % 4 == 3 and has_called(draft, ENTER_INFERENCE):
        draft.hide(draft.call(ENTER_INFERENCE, True))
        return
    enter_some(draft, picks)
    _leave_at(draft, len(draft.open) - 1, picks[2])


def enter_some(draft: Draft, picks: Picks) -> None:
    """Enters a block of a kind that the program has: some only have constant grad modes, or no inference blocks."""
    grad_block = queried if has_called(draft, IS_GRAD_ENABLED) else grad
    other = inference if has_called(draft, ENTER_INFERENCE) else autocast
    (autocast, grad_block, grad_block, other)[picks[0] % 4](draft, picks)


def has_called(draft: Draft, target: Callable[..., object]) -> bool:
    """Whether the program calls this function anywhere."""
    return bool(draft.graph.find_nodes(op="call_function", target=target, sort=False))


def _check_depth(draft: Draft) -> None:
    if len(draft.open) >= _DEEPEST_NEST:
        raise UnfitError("enough blocks are open")


def _set_grad(draft: Draft, wanted: Node | bool, pick: int) -> None:  # noqa: FBT001
    if pick % 8 == 7:
        draft.call(SET_GRAD, enabled=wanted)
    else:
        draft.call(SET_GRAD, wanted)


def _caching_one_dtype(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a block, which caches no weights if it casts to half precision.

    Torch 2.13 looks up a cast weight without its dtype, so with two dtypes in the cache the result depends on when
    exactly the outermost block is exited, which is undefined for blocks that cross it.
    """
    device, dtype, enabled, cache = options + (None, None, True, None)[len(options) :]
    found = torch.get_autocast_dtype(device) if dtype is None else dtype
    keeps_half = cache is not False and found is torch.float16 and device == "cpu"
    return (device, dtype, enabled, False) if keeps_half else options


def _leave_at(draft: Draft, at: int, pick: int) -> None:
    if not draft.open:
        raise UnfitError("no block is open")
    block = draft.open.pop(at)
    if pick % 8 == 7:
        draft.call(block.leave, **{"enabled" if block.leave is SET_GRAD else "mode": block.handle})
    else:
        draft.call(block.leave, block.handle)


NESTS: Steps = {
    "nests.grad": grad,
    "nests.queried": queried,
    "nests.toggle": toggle,
    "nests.autocast": autocast,
    "nests.inference": inference,
    "nests.again": again,
    "nests.leave": leave,
    "nests.cross": cross,
    "nests.forget": forget,
    "nests.empty": empty,
}


def only(draft: Draft, picks: Picks) -> None:
    """A block of one operator whose result may be unused: mutation, random numbers, or a product."""
    enter_some(draft, (picks[1], picks[2], picks[3], picks[0]))
    match picks[0] % 3:
        case 0:
            buffer = draft.attribute(BUFFERS[picks[1] % len(BUFFERS)])
            if draft.may_mutate(draft.values[buffer]):
                draft.method("mul_", buffer, 0.5)
        case 1:
            draft.call(torch.rand_like, draft.matrix(picks[2]))
        case _:
            draft.call(torch.matmul, draft.matrix(picks[2]), draft.method("t", draft.matrix(picks[3])))
    leave(draft, picks)


def weight(draft: Draft, picks: Picks) -> None:
    """A layer whose weight autocast casts, and caches while the outermost block is open."""
    matrix = draft.matrix(picks[0])
    draft.call(functional.linear, matrix, draft.attribute(("weight", "tied.weight")[picks[1] % 2]))


def border(draft: Draft, picks: Picks) -> None:
    """A list, a size or a view that is made on one side of a mode switch and used on the other."""
    matrix = draft.matrix(picks[0])
    switch = leave if picks[1] % 2 and draft.open else enter_some
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
    """Two bodies of which one runs; torch retraces branches that need gradients, so these need none."""
    operand = draft.method("detach", draft.matrix(picks[0]))
    positive = draft.call(torch.gt, draft.method("sum", operand), 0.0)
    bodies = [draft.attribute(_body_name(draft, pick)) for pick in (picks[1], picks[3])]
    results = draft.call(torch.ops.higher_order.cond, positive, *bodies, (operand,))
    draft.call(operator.getitem, results, 0)


def _body_name(draft: Draft, pick: int) -> str:
    """A body that may run here: some programs have no inference block, some assume that gradients are on."""
    used = draft.state.used
    unfit = set() if has_called(draft, ENTER_INFERENCE) else {"inference_body"}
    if "on_body" in used:
        unfit.update(_QUERYING)
    if not torch.is_grad_enabled() or has_called(draft, IS_GRAD_ENABLED) or any(name in used for name in _QUERYING):
        unfit.add("on_body")
    names = [name for name in MODE_BODIES if name not in unfit]
    return names[pick % len(names)]


#: Bodies that query the grad mode, so that programs with them may be called without gradients too.
_QUERYING = ("off_body", "mixed_body", "nest_body")

NESTED_WORK: Steps = {"nests.only": only, "nests.weight": weight, "nests.border": border, "nests.body": body}
