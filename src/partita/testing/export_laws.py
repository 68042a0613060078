"""Laws for exported programs: a captured nest of modes comes out as torch.export has it, and means the same."""

from __future__ import annotations

import torch
from torch import nn

from partita._torch.toggles import TOGGLES
from partita.equivalence import Comparison, compare
from partita.errors import CaptureError
from partita.graphs.mode import AMBIENT
from partita.graphs.program import Program
from partita.graphs.summation import summation_tolerance
from partita.testing.case import Case
from partita.testing.features import Features
from partita.testing.laws import LawError
from partita.testing.mode_subject import wrapped
from partita.testing.nested_graphs import graphs_in
from partita.testing.put_back import putting_back
from partita.tracing import capture

__all__ = ["EXPORTABLE", "check_export_laws"]

#: What torch.export can take: no values that are read, no lists that are written, nothing unknown.
EXPORTABLE = Features.only(
    *("overloads", "methods", "keywords", "modules", "attributes", "containers", "sizes", "views", "writes")
)


def check_export_laws(case: Case, *, dynamic: bool = False) -> str | None:
    """Raises where a law is broken; a program that cannot be captured is refused in the words returned.

    With `dynamic`, the first size of every tensor is a symbol where the program allows that.
    """
    if any(isinstance(module, nn.LSTM) for module in case.graph_module.modules()):
        return "torch 2.13 traces an LSTM under autocast to values of another type"
    own = case.copy()
    sizes = tuple({0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) else None for value in own.args)
    try:
        captured = capture(own.graph_module, own.args, own.kwargs, dynamic_shapes=sizes if dynamic else None)
    except CaptureError as error:
        return str(error)
    try:
        _check(case, captured)
    except Exception as error:
        raise LawError(f"an exported nest\n{case!r}\n{type(error).__name__}: {error}") from error
    return None


def _check(case: Case, captured: Program) -> None:
    after = wrapped(captured)
    for exported in (captured.exported(), after.exported()):
        left = [node for graph in graphs_in(exported.graph_module) for node in graph.nodes if node.target in TOGGLES]
        assert not left, f"toggles are left in the exported program: {left}"
    _same(_compared(case, putting_back(case, AMBIENT), captured), "the captured program")
    _same(_compared(case, captured, after), "the wrapped program")


def _compared(case: Case, before: Program, after: Program) -> Comparison:
    # A program of constants is captured with gradients on, and means that.
    tolerance = summation_tolerance(after)
    return compare(before, after, case.args, case.kwargs, no_grad_call=False, tolerance=tolerance)


def _same(comparison: Comparison, what: str) -> None:
    assert comparison.equal, f"{what}: {comparison}"
