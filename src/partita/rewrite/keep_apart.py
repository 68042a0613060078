"""Kept nodes of a body, in calls of the operator that keeps what they give."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import GraphModule, Node

import partita.hops as hops
from partita.graphs.program import Program
from partita.regions import Partition, Region
from partita.rewrite.operator_calls import OperatorCall, call_through
from partita.rewrite.outer_graph import Surroundings
from partita.rewrite.outline import outlined

__all__ = ["keep_apart"]

_KEEP = OperatorCall(hops.keep)


def keep_apart(body: Program, kept: Collection[str]) -> GraphModule:
    """A module like `body` in which the nodes with these names run inside of `hops.keep`, neighbours together."""
    runs: list[list[Node]] = []
    is_open = False
    for node in body.graph.nodes:
        if node.name in kept:
            if not is_open:
                runs.append([])
            runs[-1].append(node)
        if node.op not in ("placeholder", "get_attr"):
            is_open = node.name in kept
    regions = [Region(f"kept_{run[0].name}", tuple(run)) for run in runs]
    # Where nothing is used afterwards, nothing can be kept.
    regions = [region for region in regions if region.outputs()]
    # The calls are in the modes of what they keep: one autocast block around several of them casts a weight once.
    modes = [body.modes.at(body.index.number[region.nodes[0]]) for region in regions]
    cut = outlined(Partition(body, regions), surroundings=Surroundings(modes, modes, body.modes.final))
    for name, part in zip(cut.names, cut.bodies, strict=True):
        cut.graph_module._modules[name] = part
    call_through(cut.graph_module, dict.fromkeys(cut.names, _KEEP))
    return cut.graph_module
