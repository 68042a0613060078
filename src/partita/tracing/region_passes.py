"""What torch.export runs in the place of its region passes, on the graph as it was traced."""

from __future__ import annotations

from typing import NoReturn, final

from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule

from partita._torch.capture_callers_grad import GradSwitch, GradTrace, ask_for_callers_grad
from partita._torch.capture_recorder import Recorder
from partita.errors import CaptureError
from partita.graphs.exported import ExportRecord
from partita.graphs.program import Program
from partita.rewrite.wrap_modes import wrap_modes
from partita.tracing.trace import Trace
from partita.tracing.witness import check_against_trace

__all__ = ["Stopping", "Traced", "Wrapping"]


@final
class Wrapping:
    """Gives a traced graph the operators that its toggles stand for, once it is known that they tell the truth."""

    def __init__(self, *, says_autocast: bool = False, callers: tuple[GradSwitch, ...] = ()) -> None:
        self.recorder, self.callers = Recorder(says_autocast=says_autocast), callers
        self.trace, self.grads = Trace(), GradTrace()

    def __call__(self, raw: GraphModule, signature: ExportGraphSignature) -> tuple[GraphModule, ExportGraphSignature]:
        recorder = self.recorder
        if recorder.hangs_on_caller:
            self.trace, self.grads = Trace.of(raw, recorder), GradTrace.of(raw, recorder.seen)
        ask_for_callers_grad(raw, self.callers)
        _check(recorder, raw)
        wrapped = wrap_modes(Program(raw, export=_record(signature)))
        return wrapped.graph_module, signature if wrapped.export is None else wrapped.export.signature


class Traced(Exception):  # noqa: N818
    """Ends an export of which only the trace was wanted."""


@final
class Stopping:
    """Goes no further than the trace."""

    def __init__(self, *, says_autocast: bool) -> None:
        self.recorder = Recorder(says_autocast=says_autocast)
        self.trace, self.grads = Trace(), GradTrace()

    def __call__(self, raw: GraphModule, signature: ExportGraphSignature) -> NoReturn:
        self.trace, self.grads = Trace.of(raw, self.recorder), GradTrace.of(raw, self.recorder.seen)
        raise Traced


def _check(recorder: Recorder, raw: GraphModule) -> None:
    if recorder.problems:
        raise CaptureError(f"{recorder.problems[0]}, and no graph can say that; enter and leave blocks using `with`")
    if recorder.constants.has_lost_gradients:
        raise CaptureError(
            "it computes with a tensor that requires gradients but is neither an argument nor in its state, so that "
            "these gradients would be lost; register it as a parameter, or its module as a submodule"
        )
    check_against_trace(raw, recorder.seen)


def _record(signature: ExportGraphSignature) -> ExportRecord:
    """What is known of an exported program while torch still makes it."""
    return ExportRecord(
        signature, state={}, constants={}, ranges={}, module_calls=(), example_inputs=None, verifiers=()
    )
