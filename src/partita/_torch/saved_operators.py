"""Watching operators from below autograd: what each of them makes, and how many FLOPs it takes as torch counts them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from partita._torch.dry_runs import Allowance, is_composite, on_meta
from partita._torch.symbolic import hint_of

__all__ = ["OperatorWatch", "gives_only_views"]


class OperatorWatch(TorchDispatchMode):
    """Counts the FLOPs of the operators that run in it, and shows `notice` what each of them makes, views left out.

    It raises where they are more than `allowance` has. With `makes_meta`, factories make tensors on meta.
    """

    supports_higher_order_operators = True

    def __init__(self, notice: Callable[[Any], object], allowance: Allowance, *, makes_meta: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._notice = notice
        self._allowance = allowance
        self._makes_meta = makes_meta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            self._allowance.spend(func, args, kwargs)
            self.flops += self._flops_of_branches(func, args)
            result = func(*args, **kwargs)
            self._notice(result)
            return result
        if func.namespace == "prim":  # Fake tensors are asked for their device all the time.
            return func(*args, **kwargs)
        self._allowance.spend(func, args, kwargs)
        if self._makes_meta:
            kwargs = on_meta(func, args, kwargs)
        formula = _formula_for(func._overloadpacket)
        if formula is None and is_composite(func):
            with self:  # Without autograd, in inference mode, operators come here before they are taken apart.
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        for statistics in _updated_statistics(func, args, kwargs):
            increment_version(statistics)  # torch does not count this write.
        if formula is not None:
            self.flops += int(hint_of(formula(*args, **kwargs, out_val=result)))
        if not _gives_views(func):
            self._notice(result)
        return result

    def _flops_of_branches(self, func: Any, args: Any) -> int:
        """Those of the branch that takes more, as torch's counter has it; bodies of other operators are not counted."""
        if func is not torch.ops.higher_order.cond:
            return 0
        _, *branches, operands = args
        return max(self._flops_of_branch(branch, operands) for branch in branches)

    def _flops_of_branch(self, branch: Callable[..., Any], operands: Any) -> int:
        before, notice = self.flops, self._notice
        self._notice = _ignore
        try:
            with self:
                branch(*operands)
            return self.flops - before
        finally:
            self.flops, self._notice = before, notice


@cache
def gives_only_views(target: Any) -> bool:
    """Whether an operator of torch's writes nothing, and gives views of what it reads, or copies where it must."""
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    returns = target._schema.returns
    return bool(returns) and all(result.alias_info is not None for result in returns)


def _ignore(result: Any) -> None:
    """What a branch gives is not what the operator gives."""


def _formula_for(packet: Any) -> Callable[..., Any] | None:
    # torch 2.13 has formulas for the attention of accelerators only.
    known = _ATTENTION_LIKE.get(packet, packet)
    formula: Callable[..., Any] | None = flop_registry.get(known)
    return formula


_aten: Any = torch.ops.aten
_ATTENTION_LIKE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
}


def _updated_statistics(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """What a norm in training writes, which its schema does not say."""
    places = _places_of_statistics(func)
    if not places:
        return []
    given = {name: args[place] if place < len(args) else kwargs.get(name) for name, place in places.items()}
    tensors = [given["running_mean"], given["running_var"]] if given.get("training", True) else []
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


@cache
def _places_of_statistics(func: Any) -> dict[str, int]:
    arguments = {argument.name: place for place, argument in enumerate(func._schema.arguments)}
    if func._schema.is_mutable or not arguments.keys() >= {"running_mean", "running_var"}:
        return {}
    return {name: arguments[name] for name in ("running_mean", "running_var", "training") if name in arguments}


@cache
def _gives_views(func: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
