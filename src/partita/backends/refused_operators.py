"""Operators that compilers which trace with fake tensors do not take."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from partita._torch.backend_kernels import (
    has_meta_kernel,
    name_of_operator,
    size_depends_on_data,
    value_depends_on_data,
)
from partita._torch.schemas import has_registered_effect
from partita._torch.traced_dropout import loses_dropout
from partita.backends.reasons import (
    DROPOUT,
    GENERATOR,
    IN_PLACE_COLLECTIVE,
    LSTM,
    MKLDNN,
    NO_META_KERNEL,
    QUANTIZED,
    SIDE_EFFECT,
    SIZE_DEPENDS_ON_DATA,
    SPARSE,
    VALUE_DEPENDS_ON_DATA,
    WRITES_TWICE,
)
from partita.graphs.behaviour_terms import nodes_in
from partita.graphs.values import value_of

__all__ = ["VALUE_FROM_DATA", "is_mask_among", "refusal_of_operator"]

#: Operators that give Python a truth value.
VALUE_FROM_DATA = frozenset(("allclose", "equal", "is_nonzero"))


def refusal_of_operator(node: Node) -> str | None:
    """Why a call of an operator with a schema is refused."""
    target = node.target
    reason = _known_refusal(target)
    if reason == NO_META_KERNEL:
        # Someone may have registered one since.
        reason = _refusal_of_all_calls(target)
    if reason is not None:
        return reason
    if loses_dropout(target, node.args, node.kwargs):
        return DROPOUT
    if target in _INDEXING and is_mask_among(node.args[1:]):
        return SIZE_DEPENDS_ON_DATA
    if _FOREACH_IN_PLACE.fullmatch(name_of_operator(target)[1]) and not _are_apart(node.args[0]):
        return WRITES_TWICE
    if has_registered_effect(target) and not name_of_operator(target)[1].startswith(_COMPILED_EFFECTS):
        return SIDE_EFFECT
    if node.kwargs and node.kwargs.get("generator") is not None:
        return GENERATOR
    return None


def _refusal_of_all_calls(target: Any) -> str | None:
    """Why calls of an operator are refused whatever their arguments."""
    if target is torch.ops.aten.flatten.using_ints:
        return None
    namespace, name = name_of_operator(target)
    if namespace in _NAMESPACES:
        return _NAMESPACES[namespace]
    if name == "lstm":
        return LSTM
    if target is torch.ops.aten._assert_async.default:
        # Functionalization (torch 2.13) keeps the overload with a message, and loses this one.
        return SIDE_EFFECT
    if not has_meta_kernel(target):
        return NO_META_KERNEL
    if size_depends_on_data(target) and target not in _INDEXING:
        return SIZE_DEPENDS_ON_DATA
    depends = name in VALUE_FROM_DATA or (value_depends_on_data(target) and name not in _READING)
    return VALUE_DEPENDS_ON_DATA if depends else None


def is_mask_among(arguments: Iterable[object]) -> bool:
    """Whether one of the arguments is a tensor of truth values, as far as the graph tells."""
    return any(map(_is_mask, nodes_in(list(arguments))))


def _are_apart(listed: object) -> bool:
    """Whether the tensors of a list have memory of their own, as far as the graph tells."""
    nodes = list(nodes_in(listed))
    return len(nodes) == 1 or (len(set(nodes)) == len(nodes) and all(map(_is_given, nodes)))


def _is_given(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _is_mask(node: Node) -> bool:
    value = value_of(node)
    if value is not None:
        return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == operator.invert.__name__:
        return any(map(_is_mask, node.all_input_nodes))
    return node.op in ("call_function", "call_method") and name.partition(".")[0] in _COMPARING


#: Functionalization (torch 2.13) writes a tensor that is in the list twice, or overlaps another, as if it were once.
_FOREACH_IN_PLACE = re.compile(r"_foreach_\w*[a-z]_")
_known_refusal = lru_cache(maxsize=1 << 12)(_refusal_of_all_calls)
_NAMESPACES = {
    "c10d": IN_PLACE_COLLECTIVE,
    "mkldnn": MKLDNN,
    "onednn": MKLDNN,
    "profiler": SIDE_EFFECT,
    "quantized": QUANTIZED,
    "sparse": SPARSE,
}
_INDEXING = frozenset((torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor))
#: Operators that give Python one number, for which a trace has symbols.
_READING = frozenset(("item", "_local_scalar_dense"))
#: Checks, and waiting for a collective: compilers keep these effects where they stand.
_COMPILED_EFFECTS = ("_assert", "_functional_assert", "sym_constrain_range", "_functional_sym_constrain", "wait_tensor")
_COMPARISONS = """
    eq ge gt isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt ne signbit
"""
_COMPARING = frozenset(_COMPARISONS.split())
