"""Exported programs that keep what their modes mean when they are decomposed, and check their inputs.

`ExportedProgram.run_decompositions` runs the body of a mode operator as it is and forgets the mode: afterwards a weight
that no_grad had frozen gets gradients (torch 2.13). This one dissolves the modes first, into casts and `detach`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.fx import Graph, GraphModule, Node

from partita._torch.capture_fresh_modes import fresh_modes
from partita._torch.export_guards import guards_of, set_guards
from partita._torch.input_guards import callers_take_guards, check_inputs
from partita._torch.lazy_modules import restore_levels
from partita._torch.schemas import viewed_node, written_nodes
from partita.errors import ModeError

__all__ = ["ModeKeepingProgram"]


class ModeKeepingProgram(ExportedProgram):
    """An exported program like any other, but for its decomposition and for how its module checks its inputs."""

    def module(self, check_guards: bool = True) -> GraphModule:  # noqa: FBT001, FBT002  The signature is torch's.
        """The program as a module that is called like the model, which checks its inputs without generated code."""
        module = super().module(check_guards=False)
        assert isinstance(module, GraphModule)
        if check_guards and callers_take_guards():
            check_inputs(module, self)
            module.recompile()
        restore_levels(module)
        return module

    def run_decompositions(
        self,
        decomp_table: dict[Any, Callable[..., Any]] | None = None,
        decompose_custom_triton_ops: bool = False,  # noqa: FBT001, FBT002  The signature is torch's.
    ) -> ExportedProgram:
        """The program in the operators that the table leaves, with `detach` wherever gradients must not flow."""
        # A rewrite gives programs, and programs give these.
        from partita.graphs.exported import ExportRecord
        from partita.graphs.program import Program
        from partita.rewrite.dissolve import dissolve

        table = default_decompositions() if decomp_table is None else dict(decomp_table)
        # The table makes an alias of it, through which gradients flow.
        table.pop(torch.ops.aten.detach.default, None)
        run_decompositions = ExportedProgram.run_decompositions
        with fresh_modes(grad=True):  # Under autocast, torch would write the casts of this moment into the program.
            plain = dissolve(Program.of(self))
            _check_writes(plain.graph)
            decomposed: ExportedProgram = run_decompositions(plain.exported(), table, decompose_custom_triton_ops)
            # torch finds conditions on sizes in what was traced, and so forgets those of a program that was loaded.
            set_guards(decomposed, dict.fromkeys((*guards_of(self), *guards_of(decomposed))))
            # Decomposed once more, as some backends do, it keeps what it means as well.
            return ExportRecord.of(decomposed).around(decomposed.graph_module)


def _check_writes(graph: Graph) -> None:
    """Raises where a write goes through `detach`: taken apart into values, it would cut off what is written as well."""
    for node in graph.nodes:
        for written in written_nodes(node):
            seen: Node | None = written
            while seen is not None and seen.target is not torch.ops.aten.detach.default:
                seen = viewed_node(seen)
            if seen is not None:
                raise ModeError(
                    f"node {node.name!r} writes a tensor that gradients flow through, under no_grad or through detach; "
                    "a decomposed program cannot keep that. Train the program as it is, or decompose it for inference "
                    "alone with torch.export.ExportedProgram.run_decompositions(program.exported())"
                )
