"""Converts programs to exported programs: modes become operators, or are dissolved before a decomposition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.fx import Graph, GraphModule, Node

from partita._torch.dry_runs import refusal_of_device
from partita._torch.fx.lazy_graph_module import generate_code
from partita._torch.modes import fresh_modes
from partita._torch.nn_modules import StandsForBody
from partita._torch.operators.schemas import mutated_nodes, viewed_node
from partita.analysis.nodes import value_of
from partita.dissolve.dissolve import dissolve
from partita.errors import ModeError, OptionError
from partita.program._torch.guards import guards_of, set_guards
from partita.program.exported import ExportRecord
from partita.program.program import Program
from partita.rewrite.operator_calls import calling_modules
from partita.rewrite.wrap_modes import wrap_modes


def exported_program(program: Program) -> ExportedProgram:
    """The program as an ExportedProgram, which cannot hold toggles: these become operators."""
    return _record(program).around(wrap_modes(program).graph_module)


def exported_module(program: Program) -> GraphModule:
    """The module of an exported program, which can be pickled and copied, and checks its inputs."""
    module = calling_modules(program, {}).graph_module
    generate_code((module,))  # torch.export reads the signature of `forward`.
    return module


def decomposed_program(
    program: Program, table: dict[Any, Callable[..., Any]] | None, *, decompose_custom_triton_ops: bool
) -> ExportedProgram:
    """The decomposed program, with `detach` wherever gradients must not flow.

    torch runs the body of a mode operator as it is and forgets the mode: afterwards a weight that no_grad had frozen
    gets gradients (torch 2.13). So the modes are dissolved first, into casts and `detach`.
    """
    guards = _record(program).guards
    why = refusal_of_device([value_of(node) for node in program.graph.nodes])
    if why is not None:
        raise OptionError(f"the program cannot be decomposed here, since {why}; decompose it where it was exported")
    table = default_decompositions() if table is None else dict(table)
    # The table turns it into an alias, through which gradients flow.
    table.pop(torch.ops.aten.detach.default, None)
    run_decompositions = ExportedProgram.run_decompositions
    with fresh_modes(grad=True):  # Under autocast, torch would write the casts of this moment into the program.
        plain = dissolve(program)
        _check_mutations(plain.graph)
        decomposed: ExportedProgram = run_decompositions(plain.exported(), table, decompose_custom_triton_ops)
        # torch collects guards while it traces, and so loses those of a program that was loaded.
        set_guards(decomposed, dict.fromkeys((*guards, *guards_of(decomposed))))
        # It keeps its meaning when it is decomposed again, as some backends do.
        return ExportRecord.of(decomposed).around(decomposed.graph_module)


def _record(program: Program) -> ExportRecord:
    if program.export is None and any(isinstance(module, StandsForBody) for module in program.graph_module.children()):
        raise OptionError(
            "this program has lowered regions, which an exported program cannot hold; export the program that was "
            "planned, or pickle the module()"
        )
    if program.export is None:
        raise OptionError(
            "this program was made from a graph module, which has no signature to export it by; make it from an "
            "exported program, for example with partita.capture(model, args)"
        )
    return program.export


def _check_mutations(graph: Graph) -> None:
    """Raises where a mutation goes through `detach`: functionalized, it would detach the mutated tensor as well."""
    for node in graph.nodes:
        for written in mutated_nodes(node):
            seen: Node | None = written
            while seen is not None and seen.target is not torch.ops.aten.detach.default:
                seen = viewed_node(seen)
            if seen is not None:
                raise ModeError(
                    f"node {node.name!r} mutates a tensor that gradients flow through, under no_grad or through "
                    "detach; a decomposed program cannot keep that. Train the program as it is, or decompose it for "
                    "inference alone with torch.export.ExportedProgram.run_decompositions(program.exported())"
                )
