"""What torch's two passes have in common: settings of one kind become calls of torch's own operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule, Node

from partita._torch import toggles
from partita.analysis.mode import AMBIENT, Grad, Mode
from partita.analysis.modes import only_argument, traced_grad
from partita.errors import OptionError
from partita.program.exported import check_signature, following
from partita.program.mode_runs import ModeRun
from partita.program.program import Program
from partita.rewrite.wrap_modes import WrapStyle, wrap_modes

__all__ = ["Signature", "replace_with_operators"]


Signature: TypeAlias = ExportGraphSignature | None

#: For each node of a graph, whether torch begins a new piece there.
Openings: TypeAlias = Callable[[Sequence[Node]], Sequence[bool]]


def replace_with_operators(
    gm: GraphModule, graph_signature: Signature, *, kind: type, openings: Openings
) -> tuple[GraphModule, Signature]:
    """A new module with settings of one kind as operators, and a signature of its own; the same ones without any."""
    if not isinstance(gm, GraphModule):
        raise OptionError(f"the pass takes a torch.fx.GraphModule, not {type(gm).__name__}")
    if graph_signature is not None:
        check_signature(gm.graph, graph_signature)

    def names(program: Program, runs: Sequence[ModeRun]) -> Sequence[str]:
        """A body is called by the number of the piece that torch would have cut there."""
        pieces = list(accumulate(map(int, openings(program.index.nodes))))
        return [f"submod_{pieces[run.numbers[0]]}" for run in runs]

    # The autocast pass leaves grad modes as they are, so there the caller makes no difference.
    program = Program(gm, caller=_caller(gm) if kind is Grad else AMBIENT)
    style = WrapStyle("torch", frozenset((kind,)), names, named_by_operator=True, passes_symbols=False)
    result = wrap_modes(program, style)
    if result is program:
        return gm, graph_signature
    module = result.graph_module
    module.recompile()
    module.graph.lint()
    return module, None if graph_signature is None else following(graph_signature, module.graph)


def _caller(gm: GraphModule) -> Mode:
    """The grad mode that a graph is taken to be called in, to which its toggles are compared.

    Torch takes the mode of whoever runs the pass; what counts is how the program will be called, with gradients as a
    rule. A graph that switches gradients on and ends with them off was traced with them off, where torch.export runs
    the pass as well: its blocks say what the caller's mode does not. Run in another mode, or with toggles that are no
    blocks, all of them are kept.
    """
    found = gm.graph.find_nodes(op="call_function", target=toggles.SET_GRAD)
    values = [only_argument(node, "enabled") for node in found]
    if not values:  # Bodies may have some.
        return AMBIENT if traced_grad(gm) is False else Mode(grad=True)
    if True not in values or values[-1] is not False:
        return Mode(grad=True)
    return AMBIENT if torch.is_grad_enabled() or len(values) % 2 else Mode(grad=False)
