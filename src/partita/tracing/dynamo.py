"""The torch.compile backend `partita`: cuts Dynamo's graph and hands each part to another backend.

`torch.compile(model, backend="partita", options={"policy": ByModule(...), "inner": "inductor"})` finds it by its entry
point; the function can be given as the backend as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from partita.graphs.mode import Mode
from partita.graphs.program import Program
from partita.plans import Plan, plan
from partita.plans.treatment import marks_suffice
from partita.tracing.backend_options import BackendOptions, Inner
from partita.tracing.marked import marks_written
from partita.tracing.piece_borders import Border, Bordered, border_of_graph
from partita.tracing.piece_compiler import compile_pieces
from partita.tracing.pieces import Waiting

__all__ = ["backend"]

log = logging.getLogger(__name__)


def backend(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """A function like `gm` whose regions run as the inner backend compiled them; nodes outside regions run eagerly.

    The options are `policy` (who cuts; by default all is one region), `treatment` (by default `Call()`) and `inner`:
    a backend's name or a function from a graph and fake example inputs to what is called, by default "inductor". It
    gets the regions that are still graphs after their treatment, each with a tuple as output. Where all treatments only
    need their marks (`Recompute`), it gets the whole graph with these.
    """
    chosen = BackendOptions.read(options)
    inner = chosen.inner_backend()
    # Dynamo has guarded the grad mode, and writes the end of a no_grad block down as that mode, not as a return to it.
    program = Program.of(gm).under(Mode(grad=torch.is_grad_enabled()))
    decided = plan(program, chosen.policy, chosen.treatment)
    with marks_written(decided, example_inputs):
        if decided.treatments and all(map(marks_suffice, decided.treatments)):
            return _compiled_whole(gm, inner, example_inputs)
        return _compiled_in_pieces(gm, decided, inner, example_inputs)


def _compiled_whole(gm: GraphModule, inner: Inner, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    border = border_of_graph(gm)
    compiled = inner(gm, example_inputs)
    return compiled if border == Border() else Bordered(compiled, border)


def _compiled_in_pieces(gm: GraphModule, decided: Plan, inner: Inner, example_inputs: Sequence[Any]) -> GraphModule:
    if decided.program.effects.fences:
        # Between the nodes that enter and leave a transform tensors are wrapped, which no compiler has seen.
        log.warning("the graph enters transforms of torch.func; its parts run as they are, uncompiled")
        return decided.apply().graph_module
    cut = Plan(decided.partition, tuple(map(Waiting, decided.treatments))).apply().graph_module
    compile_pieces(cut, gm, inner, example_inputs)
    return cut
