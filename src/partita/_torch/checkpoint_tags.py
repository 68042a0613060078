"""Recomputed bodies where a tracer writes down their operators: tags on the nodes, which a partitioner acts on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from partita._torch.body_runs import run_body
from partita._torch.checkpoint_runs import ContextFunction, saves_as_always
from partita._torch.checkpoint_steps import TracedStep, run_kept_in_step, traces_whole_step
from partita._torch.node_tags import SAVED, next_graph_id, node_tags, saving, tagging

__all__ = ["run_kept_tagged", "run_tagged", "tag_nodes"]


def run_tagged(
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    keywords: Mapping[str, Any],
    *,
    context_fn: ContextFunction | None,
    saved: Collection[Node],
) -> Any:
    """What `body` gives; the nodes that are traced meanwhile say that they can be computed again, but for `saved`.

    A selective context function decides node by node. Where the backward is traced too, the body runs again there; a
    compiler sees to that itself, later.
    """
    is_saved = (node_tags() or {}).get("recompute") is CheckpointPolicy.MUST_SAVE
    if is_saved:
        return run_body(nullcontext(), body, operands, keywords)
    if not _may_train(body, operands, keywords):
        with saving(saved):  # Others may train on what the body has written.
            return run_body(nullcontext(), body, operands, keywords)
    first, again = (None, None) if context_fn is None else context_fn()
    number = next_graph_id()
    run: Callable[[], Any] = partial(run_body, nullcontext(), body, operands, keywords)
    if traces_whole_step() and not saves_as_always():
        run = TracedStep(body, operands, keywords, again).first
    if first is None:
        with tagging({"ac_graph_id": number, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}), saving(saved):
            return run()
    if hasattr(first, "ac_graph_id"):
        first.ac_graph_id = number
    with tagging({"ac_graph_id": number}), first:
        return run()


def _may_train(body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Whether autograd may save anything: a compiler refuses what draws and is tagged, in graphs without a backward."""
    state = body.parameters() if isinstance(body, nn.Module) else ()
    given = (*tree_leaves((operands, dict(keywords))), *state)
    return torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given)


def run_kept_tagged(body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """What `body` gives; where nodes are tagged, these say that they are saved."""
    is_recomputed = bool(node_tags())
    with tagging(SAVED) if is_recomputed else nullcontext():
        return run_kept_in_step(partial(run_body, nullcontext(), body, operands, keywords))


def tag_nodes(gmod: Any, is_sac: bool) -> Any:  # noqa: FBT001  The signature is torch's.
    """Tags every call of a graph, in place: a selective policy decides later what is recomputed, or all of it is."""
    number = next_graph_id()
    for node in gmod.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            node.meta["ac_graph_id"] = number
            node.meta["recompute"] = None if is_sac else CheckpointPolicy.PREFER_RECOMPUTE
    return gmod
