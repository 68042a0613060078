"""Trials of single nodes: whether autograd saves something for one, and how much has been computed by then."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from partita._torch.dry_runs import Allowance, is_torchs, refusal_of_call
from partita._torch.saved_operators import gives_only_views
from partita._torch.saving_trial import flops_until_saved
from partita._torch.toggles import TOGGLES
from partita.graphs.flops import without_memory
from partita.graphs.values import tensors_in as traced_tensors
from partita.graphs.values import value_of

__all__ = ["SavingTrials"]

#: More than nothing: whoever saves its result must have computed.
_UNKNOWN = 1
#: How many operators trials may come down to in all, how many more for each trial, and the most items of a container.
_CALLS, _MORE_CALLS, _MOST_ITEMS = 100_000, 1_000, 1_000


class SavingTrials:
    """What autograd saves for nodes, each tried apart; equal operators on equal shapes are tried once.

    All inputs that can have gradients are taken to have them, so that more may be saved here than in the program. What
    cannot be tried is taken to save its result. A program as a whole is looked at by `saved_tensors_of`.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int | None] = {}
        self._allowance = Allowance(_CALLS)

    def flops_until_saved(self, node: Node) -> int | None:
        """How many of the node's FLOPs are done when it saves something for the last time; None if it saves nothing."""
        if node.op == "get_attr" or node.target in TOGGLES or _saves_nothing(node):
            return None
        if not _can_be_tried(node):
            return _UNKNOWN
        try:
            return self._tried(node)
        except Exception:  # A function may refuse tensors without memory in any way.
            return _UNKNOWN

    def _tried(self, node: Node) -> int | None:
        arguments: Any = map_arg((node.args, node.kwargs), lambda source: without_memory(value_of(source)))
        args, kwargs = arguments
        if refusal_of_call(node.target, args, kwargs) is not None:
            return _UNKNOWN
        key = (node.op, node.target, repr(arguments))
        if key not in self._known:
            self._allowance.add(_MORE_CALLS)
            self._known[key] = _UNKNOWN  # Unless it can be tried.
            self._known[key] = flops_until_saved(node.op, node.target, args, kwargs, allowance=self._allowance)
        return self._known[key]


def _saves_nothing(node: Node) -> bool:
    """Whether that is known without a trial: it takes an item or a view, or reads no tensors."""
    read = [value_of(source) for source in node.all_input_nodes]
    if any(value is None for value in read):
        return False
    if node.target is operator.getitem and read and isinstance(read[0], tuple | list):
        return True
    if gives_only_views(node.target):
        return all(tensor.layout is torch.strided for value in read for tensor in traced_tensors(value))
    is_known = node.op == "call_method" or (node.op == "call_function" and is_torchs(node.target))
    return is_known and not any(True for value in read for _ in traced_tensors(value))


def _can_be_tried(node: Node) -> bool:
    """Whether it is an operator, a function or a method of torch's, on traced values; nobody else's code is run."""
    read = [value_of(source) for source in node.all_input_nodes]
    if any(value is None or (isinstance(value, tuple | list) and len(value) > _MOST_ITEMS) for value in read):
        return False
    if node.op == "call_method":
        return isinstance(read[0], Tensor) and hasattr(Tensor, str(node.target))
    if node.op != "call_function" or not is_torchs(node.target):
        return False
    # Python's operators repeat containers as often as they are told.
    given = (*read, *(argument for argument in node.args if not isinstance(argument, Node)))
    return not _is_pythons(node.target) or not any(isinstance(one, tuple | list) for one in given)


def _is_pythons(target: Any) -> bool:
    return target is not operator.getitem and getattr(target, "__module__", None) == operator.add.__module__
