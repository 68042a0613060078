"""The program that a rewrite gives: the old one with a new graph, which may switch modes by toggles."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule

from partita.graphs.program import Program
from partita.graphs.state_keys import StateKeys
from partita.graphs.tolerance import EXACT, Tolerance
from partita.rewrite.decomposition import ModeKeepingProgram

__all__ = ["rewritten"]


def rewritten(
    program: Program, graph_module: GraphModule, *, state_keys: StateKeys | None = None, tolerance: Tolerance = EXACT
) -> Program:
    """`program` with another graph; an exported one writes its modes as operators when it is exported again."""
    result = program.rewritten(graph_module, state_keys=state_keys, tolerance=tolerance)
    if result.export is not None:
        result.export = replace(
            result.export.following(graph_module.graph), finish=_with_mode_operators, kind=ModeKeepingProgram
        )
    return result


def _with_mode_operators(program: Program) -> Program:
    # That rewrite outlines, and outlining gives programs like these.
    from partita.rewrite.wrap_modes import wrap_modes

    return wrap_modes(program)
