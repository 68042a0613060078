"""`torch._export.passes.replace_set_grad_with_hop_pass`: grad modes as calls of torch's wrapping operator."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from partita._torch import toggles
from partita.analysis.modes import Grad
from partita.compat.replace_with_hop_pass_util import Signature, replace_with_operators

__all__ = ["replace_set_grad_with_hop_pass"]


def replace_set_grad_with_hop_pass(gm: GraphModule, graph_signature: Signature) -> tuple[GraphModule, Signature]:
    """A new module in which what runs with gradients switched off is a call of `wrap_with_set_grad_enabled`.

    The program is assumed to be called with gradients on, whatever the mode while the pass runs; in one that was
    exported with gradients off, and enables them, what runs with gradients is wrapped. A region that starts or ends
    inside an autocast block is wrapped like any other. Neither the module nor the signature is changed; without a
    toggle both are returned themselves.
    """
    return replace_with_operators(gm, graph_signature, kind=Grad, openings=_openings)


def _openings(nodes: Sequence[Node]) -> Sequence[bool]:
    return [node.target is toggles.SET_GRAD for node in nodes]
