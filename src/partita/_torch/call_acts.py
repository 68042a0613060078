"""What a call in a graph may do beside computing, from what torch declares alone: write to tensors, and draw."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Node

from partita._torch.schemas import Signature, signatures_of, signatures_of_method

__all__ = ["CallActs", "acts_of_call"]


class CallActs(NamedTuple):
    """Whether a call may write to what was there before, and whether it may draw random numbers."""

    writes: bool
    draws: bool


def acts_of_call(node: Node) -> CallActs:
    """What a call may do; a module, and a function without a schema, may do both."""
    if node.target in _PLAIN or _is_check(node.target):
        return CallActs(writes=False, draws=False)
    signatures = [signature for signature in _signatures(node) if _may_be_meant(signature, node)]
    if not signatures:
        return CallActs(writes=True, draws=True)
    writes = node.kwargs.get("out") is not None or any(map(_writes, signatures))
    return CallActs(
        writes, any(signature.draws or _may_hide_a_draw(signature, node.target) for signature in signatures)
    )


def _signatures(node: Node) -> tuple[Signature, ...]:
    if node.op == "call_method":
        return signatures_of_method(str(node.target))
    return () if node.op == "call_module" else signatures_of(node.target)


def _may_be_meant(signature: Signature, node: Node) -> bool:
    """Whether a call may reach this overload; those that write into `out` are reached by what is given for it."""
    if not signature.is_out or isinstance(node.target, OpOverload):
        return True
    names = ("out", *(argument.name for argument in signature.arguments if argument.written))
    return any(node.kwargs.get(name) is not None for name in names)


def _writes(signature: Signature) -> bool:
    return any(argument.written or argument.name in _STATISTICS for argument in signature.arguments)


def _may_hide_a_draw(signature: Signature, target: Any) -> bool:
    """Whether an operator's own tags do not speak for the operators that it calls: dropout in attention, say."""
    if not signature.name.startswith("aten::"):
        return True  # An operator of somebody else's may draw without saying so.
    return _is_composite(target.name()) if isinstance(target, OpOverload) else _has_composite(signature.name)


@cache
def _has_composite(name: str) -> bool:
    """Whether any overload of an operator of torch's is one."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    return any(_is_composite(getattr(packet, overload).name()) for overload in packet.overloads())


def _is_composite(name: str) -> bool:
    # TorchScript has overloads for Python numbers, of which the dispatcher knows nothing.
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(
        name, torch._C.DispatchKey.CompositeImplicitAutograd
    )


def _is_check(target: Any) -> bool:
    return isinstance(target, OpOverload) and "assert" in target.name()


#: What the norms of torch write in training, which their schemas do not say.
_STATISTICS = ("running_mean", "running_var")

#: Functions of Python that only compute. Those that write in place have a second name in `operator`, so all are listed.
_PLAIN = frozenset(
    getattr(operator, name)
    for name in (
        *("abs", "add", "and_", "floordiv", "index", "inv", "invert", "lshift", "matmul", "mod", "mul", "neg", "or_"),
        *("pos", "pow", "rshift", "sub", "truediv", "xor"),
        *("eq", "ge", "gt", "is_", "is_not", "le", "lt", "ne", "not_", "truth"),
        *("concat", "contains", "countOf", "getitem", "indexOf", "length_hint"),
    )
)
