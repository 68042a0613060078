"""The Dynamo backend."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from partita.analysis.mode import Mode
from partita.plans import Plan, plan
from partita.plans.treatment import annotation_suffices
from partita.program.program import Program
from partita.torch_compile.options import BackendOptions, Inner
from partita.torch_compile.piece_borders import Border, Bordered, border_of_graph
from partita.torch_compile.pieces import Waiting, compile_pieces

__all__ = ["backend", "digest_of_marks"]


# The torch.compile backend `partita`: cuts Dynamo's graph and hands each part to another backend.
#
# `torch.compile(model, backend="partita", options={"policy": ByModule(...), "inner": "inductor"})` finds it by its
# entry point; the function can be given as the backend as well.


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
        if decided.treatments and all(map(annotation_suffices, decided.treatments)):
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


# Marks on the nodes of Dynamo's graph, for compilers that read them.


@contextmanager
def marks_written(decided: Plan, example_inputs: Sequence[Any]) -> Iterator[None]:
    """Writes the marks of a plan on its graph, which the backend owns; the graph or its parts are compiled inside."""
    marks = decided.marks() if _is_trained(example_inputs) else _for_inference(decided.marks())
    for node, own in marks.items():
        node.meta.update(own)
    # torch's cache of compiled graphs sees no metadata: without the tag, another plan would get the old code.
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag=_tag(marks)):
        yield


def _is_trained(example_inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)


def _for_inference(marks: Mapping[Node, Mapping[str, object]]) -> dict[Node, dict[str, object]]:
    """Without what is about a backward that will never be: torch 2.13 refuses to recompute random numbers there."""
    return {node: {key: own[key] for key in own if key not in _OF_A_BACKWARD} for node, own in marks.items()}


_OF_A_BACKWARD = ("recompute", "ac_graph_id")


def digest_of_marks(marks: Mapping[Node, Mapping[str, object]]) -> str:
    """A text that differs for plans that mark otherwise, and is the same for equal ones in every process.

    The numbers of regions only count by their order, since they go on from plan to plan.
    """
    order: dict[object, int] = {}
    told = []
    for node, own in marks.items():
        for key, value in own.items():
            shown = order.setdefault(value, len(order)) if isinstance(value, int) and key == "ac_graph_id" else value
            told.append(f"{node.name} {key} {shown}")
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _tag(marks: Mapping[Node, Mapping[str, object]]) -> str:
    given = torch.compiler.config.cache_key_tag
    return f"{given}partita:{digest_of_marks(marks)}"
