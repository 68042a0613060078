"""Symbolic scalars: truth values and floats that follow from symbolic numbers alone, the same in every mode."""

from __future__ import annotations

import torch
from torch.fx import Node

from partita._torch.schemas import nodes_by_target
from partita._torch.symbolic import NUMBER_FUNCTIONS
from partita.graphs.index import Index
from partita.graphs.values import value_of

__all__ = ["symbolic_scalars_of"]


def symbolic_scalars_of(index: Index) -> frozenset[int]:
    """The nodes that compute one, by number; only calls of functions of numbers are looked at."""
    calls = (nodes for (_, target), nodes in nodes_by_target(index.graph).items() if target in NUMBER_FUNCTIONS)
    return frozenset(index.number[node] for nodes in calls for node in nodes if _is_scalar(node))


def _is_scalar(node: Node) -> bool:
    """Integers are none: they cross borders as they are. Neither is what `.item()` gives: that reads memory."""
    return isinstance(value_of(node), torch.SymBool | torch.SymFloat) and all(
        isinstance(value_of(read), _NUMBERS) for read in node.all_input_nodes
    )


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
