"""Trials of single nodes: whether autograd saves something for one, and how much has been computed by then."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from partita._torch.saving_trial import flops_until_saved
from partita._torch.toggles import TOGGLES
from partita.graphs.flops import is_torchs, without_memory
from partita.graphs.values import value_of

__all__ = ["SavingTrials"]

#: More than nothing: whoever saves its result must have computed.
_UNKNOWN = 1


class SavingTrials:
    """What autograd saves for nodes, each tried apart; equal operators on equal shapes are tried once.

    All inputs that can have gradients are taken to have them, so that more may be saved here than in the program. What
    cannot be tried is taken to save its result. A program as a whole is looked at by `saved_tensors_of`.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int | None] = {}

    def flops_until_saved(self, node: Node) -> int | None:
        """How many of the node's FLOPs are done when it saves something for the last time; None if it saves nothing."""
        if node.op == "get_attr" or node.target in TOGGLES:
            return None
        if not _can_be_tried(node):
            return _UNKNOWN
        arguments: Any = map_arg((node.args, node.kwargs), lambda source: without_memory(value_of(source)))
        key = (node.op, node.target, repr(arguments))
        if key not in self._known:
            self._known[key] = _tried(node, *arguments)
        return self._known[key]


def _tried(node: Node, args: Any, kwargs: Any) -> int | None:
    try:
        return flops_until_saved(node.op, node.target, args, kwargs)
    except Exception:  # A function may refuse tensors without memory in any way.
        return _UNKNOWN


def _can_be_tried(node: Node) -> bool:
    """Whether it is an operator, a function or a method of torch's, on traced values; nobody else's code is run."""
    if any(value_of(source) is None for source in node.all_input_nodes):
        return False
    return node.op == "call_method" or (node.op == "call_function" and is_torchs(node.target))
