"""Telling dead-code elimination that a call matters though nobody reads its result."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph
from torch.fx.node import has_side_effect

__all__ = ["keep_unread_calls"]


def keep_unread_calls(operator: Any) -> None:
    """Calls of `operator` survive `Graph.eliminate_dead_code`.

    torch asks about the operator and not about the call, so this holds for calls whose body only computes as well.
    """
    has_side_effect(operator)
    if not Graph().call_function(operator).is_impure():
        # torch 2.11 heeds that list for functions and plain operators only. The registry of effects it heeds, and the
        # tokens that come with an effect are made where an operator is dispatched, which these never are.
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        _register_effectful_op(operator, _EffectType.ORDERED)
