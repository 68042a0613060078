"""`torch._export.passes.replace_autocast_with_hop_pass`: autocast blocks as calls of torch's wrapping operator."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from partita._torch import toggles
from partita.analysis.mode import Autocast
from partita.compat._hop_passes import Signature, replace_with_operators

__all__ = ["replace_autocast_with_hop_pass"]


def replace_autocast_with_hop_pass(gm: GraphModule, graph_signature: Signature) -> tuple[GraphModule, Signature]:
    """A new module in which every autocast block is a call of `wrap_with_autocast`, nested as the blocks are.

    Arguments that a block leaves out have their defaults. Grad modes inside and around stay as they are. Neither the
    module nor the signature is changed; without a block both come back as they are.
    """
    return replace_with_operators(gm, graph_signature, kind=Autocast, openings=_openings)


def _openings(nodes: Sequence[Node]) -> Sequence[bool]:
    """A piece begins where the outermost block is entered, and after the node that leaves it."""
    openings, depth, has_left = [], 0, False
    for node in nodes:
        enters, leaves = node.target is toggles.ENTER_AUTOCAST, node.target is toggles.EXIT_AUTOCAST
        openings.append(has_left or (enters and depth == 0))
        depth += enters - leaves
        has_left = leaves and depth == 0
    return openings
