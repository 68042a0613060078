"""Checks a traced graph against the modes that were really in force while each of its nodes was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch.fx import GraphModule, Node

from partita._torch.capture_fresh_modes import initial_modes, would_autocast
from partita._torch.capture_recorder import Seen
from partita.errors import CaptureError
from partita.graphs.attributes import find
from partita.graphs.index import Index
from partita.graphs.mode import Autocast, Mode
from partita.graphs.modes import modes_of
from partita.rewrite.mode_operators import setting_of

__all__ = ["check_against_trace"]


def check_against_trace(graph_module: GraphModule, seen: Mapping[Node, Seen]) -> None:
    """Raises where a node ran under another mode than the toggles before it say: something switched it unseen."""
    for node, mode in _modes_with_bodies(graph_module, Mode(grad=True, inference=False)):
        found = seen.get(node)
        if found is not None and not _agree(mode, found):
            raise CaptureError(_what_happened(node, mode, found))


def _modes_with_bodies(graph_module: GraphModule, outer: Mode) -> Iterator[tuple[Node, Mode]]:
    """Every operator in a graph and in the bodies that it calls, with the mode that the toggles tell."""
    index = Index(graph_module.graph)
    modes = modes_of(index)
    for number, node in enumerate(index.nodes):
        if node.op != "call_function" or number in modes.toggles:
            continue
        mode = modes.at(number).within(outer)
        yield node, mode
        setting = setting_of(node)
        inside = mode if setting is None else mode.setting(setting)
        for operand in node.all_input_nodes:
            body = find(graph_module, str(operand.target)) if operand.op == "get_attr" else None
            if isinstance(body, GraphModule):
                yield from _modes_with_bodies(body, replace(inside, blocks=()))


def _agree(mode: Mode, seen: Seen) -> bool:
    # A body in inference mode is traced without gradients even where it switches them on: that has no effect there.
    grad = seen.grad if mode.inference and not seen.grad else mode.grad
    if grad is not seen.grad or seen.inference:
        return False
    told = {autocast.device: autocast.dtype for autocast in mode.autocast if autocast.enabled}
    found = dict(seen.autocast)
    if not told and not found:
        return True
    start = {device: dtype for device, _, dtype in initial_modes().autocast}
    wanted = {device: start.get(device) if dtype is None else dtype for device, dtype in told.items()}
    return found == {device: dtype for device, dtype in wanted.items() if would_autocast(device, dtype)}


def _what_happened(node: Node, mode: Mode, seen: Seen) -> str:
    where = f"node {node.name!r}{_place(node)}"
    if mode.grad and not seen.grad:
        return (
            f"{where} ran without gradients, but no block around it says so; a torch.autograd.Function or a backward "
            "pass inside the model does that, and a graph cannot keep how gradients flow there: make a function an "
            "operator with torch.library.custom_op and register_autograd, or put it under torch.no_grad()"
        )
    ran = Mode(seen.grad, seen.inference, tuple(Autocast(device, dtype) for device, dtype in seen.autocast))
    return (
        f"{where} ran under: {ran}; but the blocks around it say: {mode}. Switch modes with torch's context managers "
        "only, so that they can be captured"
    )


def _place(node: Node) -> str:
    """Where the model's code calls a node's operator."""
    lines = str(node.meta.get("stack_trace") or "").splitlines()
    places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return f" ({places[-1]})" if places else ""
