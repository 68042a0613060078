"""FLOPs: how many floating-point operations a node takes, as torch counts them, from the traced values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from partita._torch.operators import OPERATORS
from partita._torch.symbolic import hint_of
from partita.graphs.values import value_of

__all__ = ["Flops", "is_torchs", "without_memory"]


class Flops:
    """The FLOPs of nodes; equal operators on equal shapes are counted once.

    An operator is run on tensors without memory under torch's counter. What is no operator of torch's, or has no traced
    values, counts as zero, and symbolic sizes count as they were in the trace.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, node: Node) -> int:
        """The FLOPs of one node."""
        if node.op != "call_function" or not is_torchs(node.target):
            return 0
        read = [value_of(source) for source in node.all_input_nodes]
        if any(value is None for value in read):
            return 0
        arguments: Any = map_arg((node.args, node.kwargs), lambda source: without_memory(value_of(source)))
        key = (node.target, repr(arguments))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _counted(node.target, *arguments)
        return found

    def total(self, nodes: Iterable[Node]) -> int:
        """The FLOPs of several nodes."""
        return sum(map(self.of, nodes))


def is_torchs(target: Any) -> bool:
    """Whether a function can be run to count: an operator, or a function of torch's; nobody else's code is run."""
    if isinstance(target, OPERATORS):
        return True
    return str(getattr(target, "__module__", None) or "").startswith(("torch", "_operator"))


def without_memory(value: Any) -> Any:
    """A traced value with tensors of the same shapes in it that take no memory."""
    if isinstance(value, torch.Tensor):
        return torch.empty([hint_of(size) for size in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, tuple | list):
        return tuple(map(without_memory, value))
    return hint_of(value)


def _counted(function: Callable[..., Any] | str, args: Any, kwargs: Any) -> int:
    assert callable(function)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            function(*args, **kwargs)
    except Exception:  # A function may refuse tensors without memory in any way; then nothing is known of it.
        return 0
    return int(counter.get_total_flops())
