"""Origin: what Dynamo notes on its graph, beside the metadata, about where the graph and its inputs come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.schemas import storage_key

__all__ = ["adopt_origin", "sources_of"]


def sources_of(root: GraphModule) -> list[Any]:
    """Where in the user's frame each input of Dynamo's graph is found; None where that is unknown."""
    placeholders: list[Node] = root.graph.find_nodes(op="placeholder")
    return [getattr(node, "_dynamo_source", None) for node in placeholders]


def adopt_origin(body: GraphModule, root: GraphModule, *, sources: Sequence[Any], args: Sequence[Any]) -> None:
    """Marks `body` as a part of Dynamo's graph `root`; its compiler then sees which inputs never move.

    Sources are left out where they could do harm: torch 2.13 fails on written arguments that are one tensor (the dedupe
    wrapper of AOTAutograd), and without sources it guards overlaps by sizes. They must be complete, so a body that has
    state of its own goes without them.
    """
    body.meta.update(root.meta)
    has_state = any(True for _ in (*body.parameters(), *body.buffers()))
    if has_state or not hasattr(root, "_param_name_to_source") or _may_share_memory(args):
        return
    body._param_name_to_source = root._param_name_to_source
    placeholders: list[Any] = body.graph.find_nodes(op="placeholder")
    for node, source in zip(placeholders, sources, strict=True):
        node._dynamo_source = source


def _may_share_memory(args: Sequence[Any]) -> bool:
    keys = [storage_key(arg) for arg in args if isinstance(arg, torch.Tensor)]
    return len(set(keys)) < len(keys)
