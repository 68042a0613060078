"""Python functions and methods that compilers which trace with fake tensors do not take."""

from __future__ import annotations

import operator

from torch.fx import Node

from partita._torch.traced_dropout import loses_dropout
from partita.backends.reasons import (
    AUTOGRAD,
    DROPOUT,
    GENERATOR,
    LEAVES_TORCH,
    LSTM,
    MKLDNN,
    QUANTIZED,
    SIDE_EFFECT,
    SIZE_DEPENDS_ON_DATA,
    SPARSE,
    TRANSFORM,
    UNKNOWN_FUNCTION,
    UNKNOWN_METHOD,
    VALUE_DEPENDS_ON_DATA,
)
from partita.backends.refused_operators import VALUE_FROM_DATA, is_mask_among
from partita.graphs.behaviour_functions import rule_of_function
from partita.graphs.behaviour_methods import rule_of_method

__all__ = ["refusal_of_function", "refusal_of_method"]


def refusal_of_function(node: Node) -> str | None:
    """Why a call of a Python function is refused: a trace keeps what it computed, and forgets what else it did."""
    target = node.target
    assert callable(target)
    behaviour = rule_of_function(target).usual
    name = getattr(target, "__name__", "")
    if target is operator.getitem:
        return SIZE_DEPENDS_ON_DATA if is_mask_among(node.args[1:]) else None
    if target is getattr:
        return AUTOGRAD if node.args[1:2] in (("grad",), ("grad_fn",)) else None
    if behaviour.fences:
        module = getattr(target, "__module__", None) or ""
        return TRANSFORM if "functorch" in module else AUTOGRAD
    if behaviour.unknown and target not in _WRITING:
        return UNKNOWN_FUNCTION
    if behaviour.impure and target not in _WRITING:
        return SIDE_EFFECT
    return _refusal_by_name(node, name)


def refusal_of_method(node: Node) -> str | None:
    """Why a call of a method is refused."""
    name = str(node.target)
    if name in _AUTOGRAD:
        return AUTOGRAD
    if name in _LEAVING:
        return LEAVES_TORCH
    if rule_of_method(name).usual.unknown:
        return UNKNOWN_METHOD
    if name == "__getitem__":
        return SIZE_DEPENDS_ON_DATA if is_mask_among(node.args[1:]) else None
    return _refusal_by_name(node, name)


def _refusal_by_name(node: Node, name: str) -> str | None:
    if name in _SIZE_FROM_DATA or (name == "where" and len(node.args) + len(node.kwargs) == 1):
        return SIZE_DEPENDS_ON_DATA
    if name == "lstm":
        return LSTM
    if node.op == "call_function" and loses_dropout(node.target, node.args, node.kwargs):
        return DROPOUT
    if name in VALUE_FROM_DATA:
        return VALUE_DEPENDS_ON_DATA
    for word, reason in _KINDS.items():
        if word in name and not name.startswith("fake_"):
            return reason
    if node.kwargs and node.kwargs.get("generator") is not None:
        return GENERATOR
    return None


_AUTOGRAD = frozenset(
    ["backward", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"]
)
_LEAVING = frozenset(
    ["__array__", "__dlpack__", "data_ptr", "numpy", "share_memory_", "storage", "tolist", "untyped_storage"]
)
_SIZE_FROM_DATA = frozenset(["argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive"])
_KINDS = {"sparse": SPARSE, "quantize": QUANTIZED, "mkldnn": MKLDNN}
#: Functions that the rules call unknown because what they write depends on what they are given.
_UPDATES = "iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem"
_WRITING = frozenset(getattr(operator, name) for name in _UPDATES.split())
