"""Idle nodes: those that compute nothing worth a call, since they only view, measure, allocate or assert."""

from __future__ import annotations

import operator
from typing import Any, final

import torch
from torch.fx import Node

from partita.graphs.behaviours import Behaviours
from partita.graphs.chosen_operators import plain_name
from partita.graphs.program import Program
from partita.graphs.projections import is_projection
from partita.graphs.values import value_of

__all__ = ["IdleNodes"]


@final
class IdleNodes:
    """Which nodes of a program are idle: views, sizes, arithmetic on sizes, items, constants and assertions."""

    def __init__(self, program: Program) -> None:
        self._root = program.graph_module
        self._known: dict[Node, bool] = {}
        self._written: dict[Node, bool] = {}
        self._behaviours = Behaviours(program.graph_module, program.pure)

    def __contains__(self, node: Node) -> bool:
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = self._is_idle(node)
        return known

    def _is_idle(self, node: Node) -> bool:
        if node.op == "call_module":
            return False
        if node.target is getattr or is_projection(node, self._root, self._written):
            return True
        if node.target is operator.getitem:
            return _is_basic_index(node.args[1])
        package = "torch" if node.op == "call_method" else _package(node.target)
        name = plain_name(node)
        if package not in _ARITHMETIC or name in _READS_DATA:
            return False
        if isinstance(value_of(node), _NUMBERS):
            return True
        return package == "torch" and (name in _SIZES_AND_VIEWS or name.startswith(_CHECKS) or self._is_constant(node))

    def _is_constant(self, node: Node) -> bool:
        """Whether it makes a tensor out of nothing but numbers."""
        if node.op == "call_method" or any(not isinstance(value_of(read), _NUMBERS) for read in node.all_input_nodes):
            return False
        return not self._behaviours.of(node).acts


def _package(target: Any) -> str:
    return str(getattr(target, "__module__", "")).partition(".")[0]


def _is_basic_index(index: Any) -> bool:
    """Whether indexing by `index` gives a view, not a gathered copy."""
    places = index if isinstance(index, tuple) else (index,)
    return all(place is None or place is Ellipsis or isinstance(place, slice | int) for place in places)


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size)
_ARITHMETIC = frozenset(("torch", "_operator", "builtins", "math"))
_READS_DATA = frozenset(("_local_scalar_dense", "item", "tolist"))
_CHECKS = ("_assert", "_log_api_usage", "sym_constrain")
_SIZE_NAMES = """
    dim element_size ndimension nelement numel size storage_offset stride sym_numel sym_size sym_storage_offset
    sym_stride
"""
_VIEW_NAMES = """
    _reshape_alias _unsafe_view adjoint alias as_strided broadcast_to chunk contiguous detach diagonal dsplit expand
    expand_as flatten hsplit imag lift_fresh moveaxis movedim narrow permute ravel real reshape reshape_as select slice
    split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsafe_chunk
    unsafe_split unsqueeze view view_as view_as_complex view_as_real vsplit
"""
_SIZES_AND_VIEWS = frozenset((_SIZE_NAMES + _VIEW_NAMES).split())
