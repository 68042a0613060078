"""Why compilers that trace a body with fake tensors do not take a node, in a few words each."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from partita._torch.backend_kernels import is_operator
from partita._torch.schemas import is_higher_order
from partita._torch.toggles import TOGGLES
from partita.backends.reasons import (
    FOREACH_ADDITION,
    FUSED_ADAM,
    INSIDE_TRANSFORM,
    RANDPERM,
    RESHAPES,
    SHARES_MEMORY,
)
from partita.backends.refused_functions import refusal_of_function, refusal_of_method
from partita.backends.refused_modules import refusal_of_higher_order, refusal_of_module
from partita.backends.refused_operators import refusal_of_operator
from partita.backends.refused_values import refusal_of_values
from partita.backends.transforms import is_inside_transform

__all__ = ["refusal_by_inductor", "refusal_by_tracing"]


def refusal_by_tracing(node: Node) -> str | None:
    """Why a trace with fake tensors fails on `node`, or would lose a part of what it does."""
    if node.op in ("placeholder", "get_attr", "output"):
        return None
    by_name = _HIDDEN.get(_name_called(node))
    return by_name or _refusal_of_call(node) or refusal_of_values(node) or _refusal_of_place(node)


def refusal_by_inductor(node: Node) -> str | None:
    """Why Inductor does not take `node`."""
    reason = _NOT_YET.get(node.target) if is_operator(node.target) else None
    if node.op == "call_function" and _name_called(node) == "randperm":
        reason = RANDPERM
    return reason or refusal_by_tracing(node)


def _name_called(node: Node) -> str:
    """What a node calls, as a method or function would be called, without overload."""
    if isinstance(node.target, str):
        return node.target if node.op == "call_method" else ""
    return str(getattr(node.target, "__name__", "")).partition(".")[0]


#: What functionalization (torch 2.13) loses: memory that results share in secret, and shapes that change in place.
_HIDDEN = {
    **dict.fromkeys(("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"), SHARES_MEMORY),
    **dict.fromkeys(("as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_"), RESHAPES),
    "unsqueeze_": RESHAPES,
}


def _refusal_of_call(node: Node) -> str | None:
    if node.op == "call_method":
        return refusal_of_method(node)
    if node.op == "call_module":
        return refusal_of_module(node, refusal_by_inductor)
    if is_operator(node.target):
        return refusal_of_operator(node)
    if is_higher_order(node.target):
        return refusal_of_higher_order(node, refusal_by_inductor)
    return None if node.target in TOGGLES else refusal_of_function(node)


def _refusal_of_place(node: Node) -> str | None:
    return INSIDE_TRANSFORM if is_inside_transform(node) else None


def _overloads(packet: str, *names: str) -> list[Any]:
    found = getattr(torch.ops.aten, packet, None)
    return [getattr(found, name) for name in names or found.overloads()] if found is not None else []


_NOT_YET: dict[Any, str] = {
    **{
        overload: FUSED_ADAM
        for packet in ("_fused_adam", "_fused_adam_", "_fused_adamw", "_fused_adamw_")
        for overload in _overloads(packet)
    },
    **{
        overload: FOREACH_ADDITION
        for packet in ("_foreach_add", "_foreach_add_")
        for overload in _overloads(packet, "Scalar")
    },
}
