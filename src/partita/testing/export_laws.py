"""Laws for exported programs: a captured nest of modes comes out as torch.export has it, and means the same."""

from __future__ import annotations

import torch
from torch import nn

from partita._torch.toggles import TOGGLES
from partita.equivalence import compare
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
    # Torch's guards may refuse sizes that the model takes.
    _same(case, putting_back(case, AMBIENT), captured, other_shapes=False)
    _same(case, captured, after, other_shapes=True)


def _same(case: Case, before: Program, after: Program, *, other_shapes: bool) -> None:
    """A program of constants is captured with gradients on, and means that."""
    comparison = compare(
        before, after, case.args, case.kwargs,
        tolerance=summation_tolerance(after), no_grad_call=False, other_shapes=other_shapes,
    )  # fmt: skip
    assert comparison.equal, str(comparison)
