"""The toggles of a graph, taken one after another: the mode in force, and what each open block will put back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from partita._torch import toggles
from partita._torch.ambient import can_autocast
from partita.errors import ModeError
from partita.graphs.mode import Autocast, Block, Inference, Mode, with_cache

__all__ = ["ModeSwitches", "autocast_arguments", "only_argument"]


class ModeSwitches:
    """`shown` is the mode in force, as far as it differs from that of the caller."""

    def __init__(self, caller: Mode) -> None:
        self.caller = caller
        self.mode = replace(caller, blocks=())
        self.shown = Mode()
        self.active = {autocast.device: autocast for autocast in with_cache(caller.autocast, None)}
        self.cache = _cache_of(caller)
        self.open_autocasts: dict[Node, tuple[Autocast | None, bool | None]] = {}
        self.open_inference: dict[Node, tuple[Mode, tuple[Node, ...]]] = {}
        self.order: list[Node] = []
        self.has_crossed = False
        self.asked_grad: dict[Node, bool | None] = {}

    def take(self, node: Node) -> bool:
        """Takes note of `node`; whether it does nothing but switch modes."""
        action = _ACTIONS.get(node.target)  # type: ignore[arg-type]
        if action is not None:
            action(self, node)
            self.shown = self.mode.beside(self.caller)
            return True
        if node.target is toggles.IS_GRAD_ENABLED:
            self.asked_grad[node] = self.mode.grad
            return bool(node.users) and all(user.target is toggles.SET_GRAD for user in node.users)
        return False

    def set_grad(self, node: Node) -> None:
        wanted = only_argument(node, "enabled")
        if isinstance(wanted, Node) and wanted in self.asked_grad:
            self.mode = replace(self.mode, grad=self.asked_grad[wanted])
        elif isinstance(wanted, bool):
            self.mode = replace(self.mode, grad=wanted)
        else:
            raise _not_constant(node)

    def enter_inference(self, node: Node) -> None:
        wanted = node.args[0] if node.args else node.kwargs.get("mode", True)
        if not isinstance(wanted, bool):
            raise _not_constant(node)
        if not node.users:
            return  # The block ends when its handle is dropped, which generated code does at once.
        self.open_inference[node] = (self.mode, tuple(self.open_autocasts))
        self.order.append(node)
        changed = (self.mode.inference, self.mode.grad) != (wanted, not wanted)
        entered = self.mode.inside(Block(node, Inference(wanted), self.shown.grad))
        self.mode = entered if changed else self.mode

    def exit_inference(self, node: Node) -> None:
        opener = _opener(node, self.open_inference)
        before, blocks = self.open_inference.pop(opener)
        closed = self.order[-1] is opener and blocks == tuple(self.open_autocasts)
        if not closed or before.autocast != self.mode.autocast:
            # Leaving an inference block puts back the whole dispatch state, autocast included (seen in torch 2.13).
            inner = self.order[self.order.index(opener) + 1 :]
            crossing = sorted({block.name for block in {*blocks} ^ {*self.open_autocasts} | {*inner}}) or ["autocast"]
            raise ModeError(
                f"{', '.join(map(repr, crossing))} crosses the inference block that {node.name!r} leaves: autocast is "
                "not as it was where the block was entered; close the inner blocks before the outer one"
            )
        self.order.pop()
        self.mode = before

    def enter_autocast(self, node: Node) -> None:
        entered = autocast_arguments(node)
        outer = self.active.get(entered.device)
        self.open_autocasts[node] = (outer, self.cache)
        self.order.append(node)
        if entered.cache is None and self.cache is not _cache_of(self.mode):
            entered = replace(entered, cache=self.cache)  # Blocks that crossed have left the flag switched.
        inside = self.mode.inside(Block(node, entered, self.shown.grad))
        self.cache = _cache_of(inside)
        if inside == self.mode:
            return  # It changes nothing.
        self.active[entered.device] = replace(entered.within(outer), cache=None)
        self.mode = inside

    def exit_autocast(self, node: Node) -> None:
        opener = _opener(node, self.open_autocasts)
        device = autocast_arguments(opener).device
        outer, self.cache = self.open_autocasts.pop(opener)
        if outer is None:
            self.active.pop(device, None)
        else:
            self.active[device] = outer
        blocks = self.mode.blocks
        self.has_crossed = self.has_crossed or self.order[-1] is not opener
        if self.has_crossed:
            blocks = self._settled(node)
        elif blocks and blocks[-1].key is opener:
            blocks = blocks[:-1]
        if self.order[-1] is opener:
            self.order.pop()
        else:
            self.order.remove(opener)
        self.has_crossed = self.has_crossed and bool(self.open_autocasts)
        self.mode = replace(self.mode, autocast=with_cache(self.active.values(), self.cache), blocks=blocks)

    def _settled(self, node: Node) -> tuple[Block, ...]:
        """Blocks that give the state in force, after blocks were left in another order than they were entered in."""
        blocks = self.mode.blocks
        kept = max((at + 1 for at, block in enumerate(blocks) if isinstance(block.sets, Inference)), default=0)
        around = with_cache(self.caller.autocast, None)
        own = [autocast for autocast in self.active.values() if autocast not in around]
        if own and self.cache is not _cache_of(self.caller):
            own[-1] = replace(own[-1], cache=self.cache)
        grad = self.shown.grad
        return (*blocks[:kept], *(Block((node, autocast.device), autocast, grad) for autocast in own))


_ACTIONS = {
    toggles.SET_GRAD: ModeSwitches.set_grad,
    toggles.ENTER_INFERENCE: ModeSwitches.enter_inference,
    toggles.EXIT_INFERENCE: ModeSwitches.exit_inference,
    toggles.ENTER_AUTOCAST: ModeSwitches.enter_autocast,
    toggles.EXIT_AUTOCAST: ModeSwitches.exit_autocast,
}


def _cache_of(mode: Mode) -> bool | None:
    """Whether autocast keeps the weights that it has cast, if the mode says so."""
    return mode.autocast[0].cache if mode.autocast else None


def autocast_arguments(node: Node) -> Autocast:
    """What the node that enters an autocast block asks for, by position, by keyword or by default."""
    named = dict(zip(("device_type", "dtype", "enabled", "cache_enabled"), node.args, strict=False)) | dict(node.kwargs)
    device, dtype = named.get("device_type"), named.get("dtype")
    enabled, cache = named.get("enabled", True), named.get("cache_enabled")
    if (
        isinstance(device, str)
        and isinstance(dtype, torch.dtype | None)
        and isinstance(enabled, bool)
        and isinstance(cache, bool | None)
    ):
        if not can_autocast(device):
            raise ModeError(
                f"node {node.name!r} enters autocast on {device!r}, which is no device type that torch can cast on; "
                "it takes a type without an index, for example 'cpu' or 'cuda'"
            )
        return Autocast(device.partition(":")[0], dtype, enabled, cache)  # torch takes "cpu:0" for "cpu".
    raise _not_constant(node)


def only_argument(node: Node, name: str) -> object:
    """The one argument of a toggle, by position or by keyword; None if there is another number of them."""
    given = (*node.args, *(value for keyword, value in node.kwargs.items() if keyword == name))
    return given[0] if len(given) == 1 and len(node.args) + len(node.kwargs) == 1 else None


def _opener(node: Node, still_open: Mapping[Node, object]) -> Node:
    opener = only_argument(node, "mode")
    if isinstance(opener, Node) and opener in still_open:
        return opener
    named = opener.name if isinstance(opener, Node) else opener
    raise ModeError(
        f"node {node.name!r} leaves {named!r}, which is not an open block: it was never entered or is left twice; "
        f"erase {node.name!r}, or enter the block before it"
    )


def _not_constant(node: Node) -> ModeError:
    return ModeError(
        f"node {node.name!r} switches a mode by values that are not constants: {node.format_node()}; "
        "a mode must be known before the program runs: trace the model again with the mode fixed"
    )
