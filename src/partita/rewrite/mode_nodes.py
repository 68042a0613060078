"""Modes as nodes: the operators that run a body under a setting, and the toggles between nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import Node

import partita.hops as hops
from partita._torch import operator_schemas as torch_operators
from partita._torch import toggles
from partita._torch.fx.graph_writer import GraphWriter
from partita.analysis.modes import AMBIENT, Autocast, Block, Grad, Inference, Mode, Setting, only_argument
from partita.errors import ModeError
from partita.rewrite.operator_calls import OperatorCall

#: Whose operators are written: Partita's, or torch's own, for programs that must load without Partita.
OperatorFamily: TypeAlias = Literal["partita", "torch"]
_BODY_POSITIONS: dict[Callable[..., Any], int] = {
    hops.call: 0,
    hops.wrap: 0,
    torch_operators.WRAP: 0,
    hops.wrap_with_set_grad_enabled: 1,
    torch_operators.WRAP_WITH_SET_GRAD_ENABLED: 1,
    hops.wrap_with_inference_mode: 1,
    hops.wrap_with_autocast: 4,
    torch_operators.WRAP_WITH_AUTOCAST: 4,
}


def operator_for(setting: Setting, family: OperatorFamily = "partita") -> OperatorCall:
    """The operator that runs a body under `setting`."""
    ours = family == "partita"
    if isinstance(setting, Grad):
        with_grad = hops.wrap_with_set_grad_enabled if ours else torch_operators.WRAP_WITH_SET_GRAD_ENABLED
        return OperatorCall(with_grad, (setting.enabled,))
    if isinstance(setting, Autocast):
        with_autocast = hops.wrap_with_autocast if ours else torch_operators.WRAP_WITH_AUTOCAST
        return OperatorCall(with_autocast, (setting.device, setting.dtype, setting.enabled, setting.cache))
    if not ours:
        raise ModeError(
            "torch has no operator that runs a body in inference mode; use Partita's operators, or no_grad in the model"
        )
    return OperatorCall(hops.wrap_with_inference_mode, (setting.enabled,))


def setting_of(call: Node) -> Setting | None:
    """The setting that a call of a mode operator, ours or torch's, sets for its body; None for other calls."""
    leading = call.args[: runs_body(call) or 0]
    if call.target in (hops.wrap_with_set_grad_enabled, torch_operators.WRAP_WITH_SET_GRAD_ENABLED):
        return Grad(*_constants(call, leading, (bool,)))
    if call.target in (hops.wrap_with_autocast, torch_operators.WRAP_WITH_AUTOCAST):
        return Autocast(*_constants(call, leading, (str, torch.dtype | None, bool, bool | None)))
    if call.target is hops.wrap_with_inference_mode:
        return Inference(*_constants(call, leading, (bool,)))
    return None


def runs_body(call: Node) -> int | None:
    """The position of the body among the arguments of a call that only runs it; None for any other node."""
    return _BODY_POSITIONS.get(call.target) if call.op == "call_function" else None  # type: ignore[arg-type]


class ModeWriter:
    """Writes toggles, and keeps track of the mode at the end of a graph that is being written.

    The caller's grad mode is unknown, so it is queried before it is first changed, and restored by value. `base` is
    the mode that the caller has set for the graph: blocks that are open there stay open. Where `caller`, the mode that
    all modes are relative to, is known, the query is only needed to restore it. A toggle that replaces one of the
    `originals` has its name, which must be reserved, and its metadata.
    """

    def __init__(
        self, writer: GraphWriter, base: Mode = AMBIENT, *, caller: Mode = AMBIENT, originals: Iterable[Node] = ()
    ) -> None:
        self.mode = self._base = base
        self.has_switched = False
        self._writer = writer
        self._caller = caller
        self._ambient_grad: Node | None = None
        self._floor = len(base.blocks)
        self._handles: list[tuple[Node, bool | None]] = []
        self._originals = dict.fromkeys(originals)

    def switch(self, wanted: Mode) -> None:
        """Writes the toggles that lead to mode `wanted`."""
        if wanted is self.mode or (wanted == self.mode and wanted.blocks == self.mode.blocks):
            return
        self.has_switched = True
        shared = _shared(wanted.blocks, self.mode.blocks)
        assert shared >= self._floor, "a body cannot leave the block that it is called in"
        self._leave(shared)
        for block in wanted.blocks[shared:]:
            # A block belongs to the run of a grad mode in which it was entered. A block may be inside a run that sets
            # the grad mode although it was entered in that of the caller, if no node in it runs in that.
            if block.grad is not None or self._knows_grad():
                self._switch_grad(replace(wanted, grad=block.grad))
            self._enter(block)
        self._switch_grad(wanted)
        self.mode = wanted

    def end_in(self, final: Mode) -> None:
        """Writes the toggles that lead to the mode in which the program ends; what is closed there is closed here.

        Torch empties its cache of casts when the outermost block is closed: one that stayed open would keep it forever.
        """
        self.switch(final)
        for at, block in enumerate(self.mode.blocks[self._floor :]):
            if block.is_closed and isinstance(block.sets, Autocast):
                # Leaving a block restores the setting at its entry, so one that is left last restores the present one.
                last = self._call(toggles.ENTER_AUTOCAST, block.sets.device, None, False, None)
                self._call(toggles.EXIT_AUTOCAST, self._handles[at][0])
                self._call(toggles.EXIT_AUTOCAST, last)

    def restore(self, *, grad: bool | None = None) -> None:
        """Writes the toggles that restore the modes of the call; the grad mode is `grad`, or by value if None."""
        self._leave(self._floor)
        if grad is None or self._base.grad is not None:
            self._switch_grad(self._base, by_value=True)
        elif self.mode.grad is not None:
            self._switch_grad(replace(self._base, grad=grad))
        self.mode = self._base

    def close(self) -> None:
        """Removes the query of the caller's grad mode if it is unused."""
        if self._ambient_grad is not None and not self._ambient_grad.users:
            self._writer.graph.erase_node(self._ambient_grad)

    def _leave(self, depth: int) -> None:
        """Leaves the innermost blocks until `depth` are open."""
        while len(self.mode.blocks) > depth:
            block = self.mode.blocks[-1]
            handle, grad = self._handles.pop()
            leaves = list(block.key.users) if isinstance(block.key, Node) else []
            if isinstance(block.sets, Inference):
                self._call(toggles.EXIT_INFERENCE, handle, instead_of=leaves)
                self.mode = replace(self.mode, grad=grad)
            else:
                self._call(toggles.EXIT_AUTOCAST, handle, instead_of=leaves)
            self.mode = replace(self.mode, blocks=self.mode.blocks[:-1])

    def _enter(self, block: Block) -> None:
        before, sets = self.mode.grad, block.sets
        entered = [block.key] if isinstance(block.key, Node) else []
        if isinstance(sets, Inference):
            self._query_grad()  # Inside the block it is too late: entering it sets the grad mode as well.
            handle = self._call(toggles.ENTER_INFERENCE, sets.enabled, instead_of=entered)
            self.mode = replace(self.mode, grad=not sets.enabled)
        else:
            arguments = (sets.device, sets.dtype, sets.enabled, sets.cache)
            handle = self._call(toggles.ENTER_AUTOCAST, *arguments, instead_of=entered)
        if isinstance(block.key, Node) and "nn_module_stack" in block.key.meta:
            handle.meta["nn_module_stack"] = dict(block.key.meta["nn_module_stack"])
        self._handles.append((handle, before))
        self.mode = replace(self.mode, blocks=(*self.mode.blocks, block))

    def _switch_grad(self, wanted: Mode, *, by_value: bool = False) -> None:
        if wanted.grad == self.mode.grad:
            return
        self._query_grad()
        value: Node | bool | None = wanted.grad
        if value is None:
            value = self._ambient_grad if by_value or self._caller.grad is None else self._caller.grad
        assert value is not None, "the caller's grad mode is unknown"
        self._call(toggles.SET_GRAD, value, instead_of=self._setting_grad(value, by_value=by_value))
        self.mode = replace(self.mode, grad=wanted.grad)

    def _setting_grad(self, value: object, *, by_value: bool) -> Iterator[Node]:
        """The originals that set this grad mode; with `by_value`, all that set one, the last first."""
        for node in reversed(self._originals) if by_value else self._originals:
            if node.target is toggles.SET_GRAD and (by_value or only_argument(node, "enabled") is value):
                yield node

    def _knows_grad(self) -> bool:
        """Whether the grad mode of the caller is known or can still be queried."""
        return self.mode.grad is None or self._ambient_grad is not None or self._caller.grad is not None

    def _query_grad(self) -> None:
        if self._ambient_grad is None and self.mode.grad is None:
            self._ambient_grad = self._call(toggles.IS_GRAD_ENABLED)

    def _call(self, toggle: object, *arguments: object, instead_of: Iterable[Node] = ()) -> Node:
        """A call of `toggle`, which replaces the first of these originals that is not replaced yet."""
        writer = self._writer
        original = next((node for node in instead_of if node in self._originals), None)
        if original is None:
            return writer.write("call_function", toggle, arguments, name=writer.names.fresh_for(toggle))
        del self._originals[original]
        written = writer.write("call_function", toggle, arguments, name=original.name)
        writer.copy_meta(original, written)
        return written


def _constants(call: Node, values: tuple[Any, ...], types: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(values) == len(types) and len(call.args) > len(types) and all(map(isinstance, values, types)):
        return values
    if len(call.args) <= len(types):
        raise ModeError(
            f"node {call.name!r} has its mode or its body as a keyword argument: {call.format_node()}; in a graph, "
            "pass them by position, as a trace does"
        )
    raise ModeError(
        f"node {call.name!r} switches a mode by values that are not constants: {call.format_node()}; "
        "a mode must be known before the program runs"
    )


def _shared(some: tuple[Block, ...], others: tuple[Block, ...]) -> int:
    """How many of the outermost blocks are the same; usually nearly all, and comparing whole tuples is fast."""
    shared = min(len(some), len(others))
    while some[:shared] != others[:shared]:
        shared -= 1
    return shared
