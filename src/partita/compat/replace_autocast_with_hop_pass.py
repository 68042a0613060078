"""`torch._export.passes.replace_autocast_with_hop_pass`: autocast blocks as calls of torch's wrapping operator."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from partita._torch import toggles
from partita.analysis.modes import Autocast
from partita.compat.replace_with_hop_pass_util import Signature, replace_with_operators

__all__ = ["replace_autocast_with_hop_pass"]


def replace_autocast_with_hop_pass(gm: GraphModule, graph_signature: Signature) -> tuple[GraphModule, Signature]:
    """A new module in which every autocast block is a call of `wrap_with_autocast`, nested as the blocks are.

    Omitted arguments of a block have their defaults. Grad modes inside and around are kept. Neither the module nor the
    signature is changed; without a block both are returned themselves.
    """
    return replace_with_operators(gm, graph_signature, kind=Autocast, openings=_openings)


def _openings(nodes: Sequence[Node]) -> Sequence[bool]:
    """A submodule starts where the outermost block is entered, and after the node that exits it."""
    openings, depth, has_exited = [], 0, False
    for node in nodes:
        enters, exits = node.target is toggles.ENTER_AUTOCAST, node.target is toggles.EXIT_AUTOCAST
        openings.append(has_exited or (enters and depth == 0))
        depth += enters - exits
        has_exited = exits and depth == 0
    return openings
