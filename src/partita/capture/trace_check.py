"""The passes that replace torch.export's region passes on a traced graph.

They check the toggles against the modes that were in force at each node, and compare traces under different callers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from partita._torch import toggles
from partita._torch.modes import initial_modes, would_autocast
from partita.analysis.index import Index
from partita.analysis.modes import AMBIENT, Autocast, Mode, modes_of
from partita.analysis.nodes import bodies_read
from partita.capture._torch.caller_modes import GradSwitch, GradTrace, follow_callers_grad
from partita.capture._torch.recorder import Recorder, Seen
from partita.errors import CaptureError
from partita.program.exported import ExportRecord
from partita.program.program import Program
from partita.rewrite.mode_nodes import setting_of
from partita.rewrite.wrap_modes import wrap_modes


@final
class WrapModesPass:
    """Checks the toggles of a traced graph, and replaces them by mode operators."""

    def __init__(self, *, reports_autocast: bool = False, callers: tuple[GradSwitch, ...] = ()) -> None:
        self.recorder, self.callers = Recorder(reports_autocast=reports_autocast), callers
        self.trace, self.grads = Trace(), GradTrace()

    def __call__(self, raw: GraphModule, signature: ExportGraphSignature) -> tuple[GraphModule, ExportGraphSignature]:
        recorder = self.recorder
        if recorder.queries_autocast or recorder.depends_on_callers_grad:
            self.trace, self.grads = Trace.of(raw, recorder), GradTrace.of(raw, recorder.seen)
        follow_callers_grad(raw, self.callers)
        _check(recorder, raw)
        wrapped = wrap_modes(Program(raw, export=_record(signature)))
        return wrapped.graph_module, signature if wrapped.export is None else wrapped.export.signature


class StopAfterTrace(Exception):  # noqa: N818
    """Ends an export of which only the trace is needed."""


@final
class TraceOnlyPass:
    """Records the trace and ends the export."""

    def __init__(self, *, reports_autocast: bool) -> None:
        self.recorder = Recorder(reports_autocast=reports_autocast)
        self.trace, self.grads = Trace(), GradTrace()

    def __call__(self, raw: GraphModule, signature: ExportGraphSignature) -> NoReturn:
        self.trace, self.grads = Trace.of(raw, self.recorder), GradTrace.of(raw, self.recorder.seen)
        raise StopAfterTrace


def _check(recorder: Recorder, raw: GraphModule) -> None:
    if recorder.problems:
        raise CaptureError(
            f"{recorder.problems[0]}, and no graph can express that; enter and leave blocks using `with`"
        )
    if recorder.constants.has_lost_gradients:
        raise CaptureError(
            "it computes with a tensor that requires gradients but is neither an argument nor in its state, so that "
            "these gradients would be lost; register it as a parameter, or its module as a submodule"
        )
    check_against_trace(raw, recorder.seen)


def _record(signature: ExportGraphSignature) -> ExportRecord:
    """The record of a program that torch is still exporting: its signature alone."""
    return ExportRecord(
        signature, state={}, constants={}, ranges={}, module_calls=(), example_inputs=None, verifiers=()
    )


@final
@dataclass(frozen=True, slots=True)
class Trace:
    """The operators of a traced graph and of its bodies, with arguments and modes, and the constants.

    Traces of one model under different modes of the caller can be compared.
    """

    operators: tuple[Any, ...] = ()
    modes: tuple[Mode, ...] = ()
    constants: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, graph_module: GraphModule, recorder: Recorder) -> Trace:
        """The operators of a graph, and the constants that its recorder has found."""
        bodies = [(path, body.graph) for path, body in graph_module.named_modules() if isinstance(body, GraphModule)]
        found = [(path, *operator) for path, graph in bodies for operator in _operators(graph)]
        return cls(
            tuple((path, *operator) for path, operator, _ in found),
            tuple(mode for _, _, mode in found),
            tuple(recorder.constants.tensors),
        )

    def computes_the_same(self, other: Trace) -> bool:
        """Whether both run the same operators on the same values, under any modes."""
        if self.operators != other.operators or len(self.constants) != len(other.constants):
            return False
        return all(map(_is_same_tensor, self.constants, other.constants))

    def calls_the_same(self, other: Trace) -> bool:
        """Whether both run the same operators, on any values."""
        return [operator[:3] for operator in self.operators] == [operator[:3] for operator in other.operators]

    def differs_in_grad_only(self, other: Trace) -> bool:
        """Whether this is `other` but for where gradients are on."""
        pairs = zip(self.modes, other.modes, strict=True) if self.computes_the_same(other) else None
        return pairs is not None and all(
            ours.inference == theirs.inference and ours.autocast == theirs.autocast for ours, theirs in pairs
        )

    def only_switches_off_more(self, other: Trace) -> bool:
        """Whether this is `other` but for blocks that switch autocast off where `other` leaves it to the caller."""
        pairs = zip(self.modes, other.modes, strict=True) if self.computes_the_same(other) else None
        return pairs is not None and all(
            ours.grad is theirs.grad
            and ours.inference == theirs.inference
            and _only_switches_off_more(_by_device(ours), _by_device(theirs))
            for ours, theirs in pairs
        )


def _operators(graph: Graph) -> Iterator[tuple[tuple[Any, ...], Mode]]:
    """Every node but toggles and queries, in a form that can be compared with another trace, and its mode."""
    index = Index(graph)
    modes = modes_of(index)
    places: dict[Node, int] = {}
    for number, node in enumerate(index.nodes):
        if number in modes.toggles or node.target is toggles.IS_GRAD_ENABLED:
            continue
        arguments = map_aggregate((node.args, dict(node.kwargs)), lambda value: _comparable(value, places))
        places[node] = len(places)
        # Placeholders and the output have no mode of their own.
        yield (node.op, node.target, arguments), AMBIENT if node.op in ("placeholder", "output") else modes.at(number)


def _comparable(value: Any, places: Mapping[Node, int]) -> tuple[Any, ...]:
    if isinstance(value, Node):
        return ("node", places.get(value))
    # nan does not equal itself, and True and -0.0 equal numbers that compute differently.
    return (type(value), repr(value) if isinstance(value, float | complex) else value)


def _is_same_tensor(ours: Tensor, theirs: Tensor) -> bool:
    if ours is theirs:
        return True
    if (ours.dtype, ours.shape, ours.device) != (theirs.dtype, theirs.shape, theirs.device) or ours.is_meta:
        return False
    with torch.no_grad():
        return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())


def _by_device(mode: Mode) -> Mapping[str, Autocast]:
    return {entered.device: entered for entered in mode.autocast}


def _only_switches_off_more(ours: Mapping[str, Autocast], theirs: Mapping[str, Autocast]) -> bool:
    if any(ours.get(device) != entered for device, entered in theirs.items()):
        return False
    return not any(entered.enabled for device, entered in ours.items() if device not in theirs)


def check_against_trace(graph_module: GraphModule, seen: Mapping[Node, Seen]) -> None:
    """Raises where a node ran under another mode than the toggles before it set: something else has switched it."""
    for node, mode in _modes_with_bodies(graph_module, Mode(grad=True, inference=False)):
        found = seen.get(node)
        if found is not None and not _agree(mode, found):
            raise CaptureError(_mismatch(node, mode, found))


def _modes_with_bodies(graph_module: GraphModule, outer: Mode) -> Iterator[tuple[Node, Mode]]:
    """Every operator in a graph and in the bodies that it calls, with the mode that the toggles set."""
    index = Index(graph_module.graph)
    modes = modes_of(index)
    for number, node in enumerate(index.nodes):
        if node.op != "call_function" or number in modes.toggles:
            continue
        mode = modes.at(number).within(outer)
        yield node, mode
        setting = setting_of(node)
        inside = mode if setting is None else mode.setting(setting)
        for _, body in bodies_read(graph_module, node.all_input_nodes):
            yield from _modes_with_bodies(body, replace(inside, blocks=()))


def _agree(mode: Mode, seen: Seen) -> bool:
    # A body in inference mode is traced without gradients even where it switches them on: that has no effect there.
    grad = seen.grad if mode.inference and not seen.grad else mode.grad
    if grad is not seen.grad or seen.inference:
        return False
    expected = {autocast.device: autocast.dtype for autocast in mode.autocast if autocast.enabled}
    found = dict(seen.autocast)
    if not expected and not found:
        return True
    start = {device: dtype for device, _, dtype in initial_modes().autocast}
    wanted = {device: start.get(device) if dtype is None else dtype for device, dtype in expected.items()}
    return found == {device: dtype for device, dtype in wanted.items() if would_autocast(device, dtype)}


def _mismatch(node: Node, mode: Mode, seen: Seen) -> str:
    where = f"node {node.name!r}{_place(node)}"
    if mode.grad and not seen.grad:
        return (
            f"{where} ran without gradients, but no block around it disables them; a torch.autograd.Function or a "
            "backward pass inside the model does that, and a graph cannot keep how gradients flow there: make a "
            "function an operator with torch.library.custom_op and register_autograd, or put it under torch.no_grad()"
        )
    ran = Mode(seen.grad, seen.inference, tuple(Autocast(device, dtype) for device, dtype in seen.autocast))
    return (
        f"{where} ran under: {ran}; but the blocks around it set: {mode}. Switch modes with torch's context managers "
        "only, so that they can be captured"
    )


def _place(node: Node) -> str:
    """Where the model's code calls a node's operator."""
    lines = str(node.meta.get("stack_trace") or "").splitlines()
    places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return f" ({places[-1]})" if places else ""
