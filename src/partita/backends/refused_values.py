"""Tensors of kinds that compilers which trace with fake tensors do not take, as far as the traced values tell."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from partita.backends.reasons import CPLUSPLUS_OBJECT, MKLDNN, NESTED, QUANTIZED, SPARSE
from partita.graphs.values import value_of

__all__ = ["refusal_of_values"]


def refusal_of_values(node: Node) -> str | None:
    """Why a node is refused for what it takes or gives."""
    for each in (node, *node.all_input_nodes):
        value = value_of(each)
        if isinstance(value, Tensor):
            reason = _refusal_of_tensor(value)
            if reason is not None:
                return reason
        elif isinstance(value, torch.ScriptObject):
            return CPLUSPLUS_OBJECT
    return None


def _refusal_of_tensor(value: Tensor) -> str | None:
    if value.is_nested:
        return NESTED
    if value.layout is not torch.strided:
        return MKLDNN if value.is_mkldnn else SPARSE
    return QUANTIZED if value.is_quantized else None
