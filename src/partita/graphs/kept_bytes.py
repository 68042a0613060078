"""How many bytes it takes to keep what a node computes: all that its operators make, not only what it gives."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from partita._torch.dry_runs import Allowance
from partita._torch.made_memory import tensors_made
from partita._torch.operators import OPERATORS
from partita._torch.symbolic import hint_of
from partita.graphs.values import value_of

__all__ = ["KeptBytes"]

#: How many operators may run in all, and how many more for each node that is looked at.
_CALLS, _MORE_CALLS = 100_000, 1_000


class KeptBytes:
    """The bytes that are kept with nodes; equal operators on equal shapes are looked at once.

    An operator of torch's is run on its traced inputs, which have no memory: attention keeps more than its result, a
    mask say. For anything else, and where a run fails, the result counts.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._allowance = Allowance(_CALLS)

    def of(self, node: Node) -> int:
        """The bytes for one node; symbolic sizes count as they were in the trace."""
        if not isinstance(node.target, OPERATORS):
            return _bytes_given(node)
        arguments: Any = map_arg((node.args, node.kwargs), value_of)
        key = (node.target, repr(arguments))
        if key not in self._known:
            self._allowance.add(_MORE_CALLS)
            made = tensors_made(node.target, *arguments, allowance=self._allowance)
            self._known[key] = _bytes_given(node) if made is None else _bytes_in(made)
        return self._known[key]


def _bytes_given(node: Node) -> int:
    value = value_of(node)
    return _bytes_in(value if isinstance(value, tuple | list) else (value,))


def _bytes_in(values: Iterable[object]) -> int:
    total = 0
    for item in values:
        if isinstance(item, Tensor):
            count = item.element_size()
            for size in item.shape:
                count *= hint_of(size)
            total += count
    return total
