"""The common part of torch's two passes: mode toggles of one kind become calls of torch's wrapping operators."""

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
from partita.compat._fused_groups import checked_module
from partita.program.exported import check_signature, following
from partita.program.mode_runs import ModeRun
from partita.program.program import Program
from partita.rewrite.wrap_modes import WrapStyle, wrap_modes

Signature: TypeAlias = ExportGraphSignature | None

#: For each node of a graph, whether torch starts a new submodule there.
Openings: TypeAlias = Callable[[Sequence[Node]], Sequence[bool]]


def replace_with_operators(
    gm: GraphModule, graph_signature: Signature, *, kind: type, openings: Openings
) -> tuple[GraphModule, Signature]:
    """A new module with modes of one kind as operators, and its signature; the arguments themselves if it has none."""
    checked_module(gm, "the pass takes")
    if graph_signature is not None:
        check_signature(gm.graph, graph_signature)

    def names(program: Program, runs: Sequence[ModeRun]) -> Sequence[str]:
        """A body has the number of the submodule that torch would have cut there."""
        pieces = list(accumulate(map(int, openings(program.index.nodes))))
        return [f"submod_{pieces[run.numbers[0]]}" for run in runs]

    # The autocast pass keeps grad modes, so there the mode of the caller makes no difference.
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
    """The assumed grad mode of the caller, relative to which toggles are redundant.

    Torch takes the mode in which the pass runs; what counts is how the program will be called, usually with gradients.
    A graph that enables gradients and ends with them disabled was traced under no_grad, where torch.export runs the
    pass as well. Run in another mode, or with toggles that are not paired, all of them are kept.
    """
    found = gm.graph.find_nodes(op="call_function", target=toggles.SET_GRAD)
    values = [only_argument(node, "enabled") for node in found]
    if not values:  # Bodies may have some.
        return AMBIENT if traced_grad(gm) is False else Mode(grad=True)
    if True not in values or values[-1] is not False:
        return Mode(grad=True)
    return AMBIENT if torch.is_grad_enabled() or len(values) % 2 else Mode(grad=False)
