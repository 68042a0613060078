"""Dry runs: what an analysis may call on tensors without memory, so that it takes little whatever a program holds."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.symbolic_shapes import hint_of

__all__ = [
    "Allowance",
    "DryRunError",
    "Guard",
    "has_kernel_for_fakes",
    "is_composite",
    "is_loop",
    "is_of_level",
    "is_torchs",
    "on_meta",
    "refusal_of_call",
]


#: The operators that torch itself defines, and that compute on tensors.
_NAMESPACES = frozenset(("aten", "prims", "quantized_decomposed", "torch_nn"))


class DryRunError(Exception):
    """A call that an analysis does not make."""


def is_torchs(target: Any) -> bool:
    """Whether a dry run may call it: an operator or a function of torch's or Python's, but for levels of torch.func."""
    if isinstance(target, HigherOrderOperator) or is_of_level(target):
        return False
    if isinstance(target, OpOverload):
        return target.namespace in _NAMESPACES
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0] in _NAMESPACES
    module = _module_of(target)
    return module in ("torch", operator.add.__module__) or module.startswith("torch.")


def is_of_level(target: Any) -> bool:
    """Whether a function enters or leaves a level of torch.func, or works inside of one only."""
    if isinstance(target, OpOverload):
        return target.name() in _OF_LEVELS
    return _module_of(target).startswith(("torch._functorch", "torch._C._functorch"))


def is_loop(target: Any) -> bool:
    """Whether a higher-order operator runs its body for each item of a tensor, also on fake ones."""
    return isinstance(target, HigherOrderOperator) and target.name() in _LOOPS


def has_kernel_for_fakes(target: Any) -> bool:
    """Whether a call on fake tensors runs no operator of another library, but what that has for fake tensors."""
    if not isinstance(target, OpOverload) or target.namespace in _NAMESPACES:
        return True
    from torch._library.simple_registry import singleton

    if is_composite(target):
        return False
    is_registered = singleton.find(target.name()).fake_impl.kernel is not None
    return is_registered or torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "Meta")


def _module_of(target: Any) -> str:
    return str(getattr(target, "__module__", None) or "")


_OF_LEVELS = frozenset(("aten::_add_batch_dim", "aten::_remove_batch_dim", "aten::_make_dual", "aten::_unpack_dual"))


class Allowance:
    """How many operators dry runs may come down to in all: one node can stand for any number of them."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def add(self, calls: int) -> None:
        """Lets dry runs call so many more."""
        self._left += calls

    def spend(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Counts one call, with each tensor in a list that it gives; raises where that is more than is left."""
        self._left -= 1 + _further_results(func, args, kwargs)
        if self._left < 0:
            raise DryRunError("it comes down to more operators than are tried")


class Guard(TorchDispatchMode):
    """Operators that run in it are counted by an `Allowance`."""

    supports_higher_order_operators = True

    def __init__(self, allowance: Allowance) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allowance = allowance

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._allowance.spend(func, args, kwargs)
        return func(*args, **kwargs)


def on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keywords of a call; an operator that makes a tensor of nothing makes it without memory."""
    if not _takes_device(func) or any(isinstance(value, Tensor) for value in args):
        return kwargs
    return {**kwargs, "device": torch.device("meta")}


@cache
def is_composite(func: OpOverload) -> bool:
    """Whether an operator computes by others, which autograd records in its place."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def refusal_of_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why an operator is not called with such arguments, which torch would not check before it reads past their end."""
    if not isinstance(target, OpOverload):
        return None
    tensors = 0
    for place, argument in enumerate(target._schema.arguments):
        given = args[place] if place < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        why = None if given is None else _why_odd(target, argument, given)
        if why is not None:
            return f"{argument.name} is {why}"
        tensors += len(given) if isinstance(given, tuple | list) else 1
    return f"it reads {tensors} values" if tensors > _MOST_VALUES and is_composite(target) else None


#: The most values that an operator may take which computes by other operators; those of lists may be in pairs.
_MOST_VALUES = 2_000
#: The arguments that say how many tensors a list has, and the most that it may have.
_COUNTS, _MOST_RESULTS = frozenset(("chunks", "r", "sections")), 2**16
_KINDS: Mapping[str, type] = {
    "ScalarType": torch.dtype,
    "MemoryFormat": torch.memory_format,
    "Layout": torch.layout,
}


def _why_odd(target: OpOverload, argument: Any, given: Any) -> str | None:
    kind = _KINDS.get(_real_type(argument))
    if kind is not None and not isinstance(given, kind):
        return f"no {kind.__name__}"
    if argument.name in _COUNTS and isinstance(given, int) and given > _MOST_RESULTS:
        return str(given)
    # One only says that a number may stand for a list.
    if (argument.N or 1) > 1 and isinstance(given, tuple | list) and len(given) != argument.N:
        # Kernels expand a single number; those of derivatives need not.
        is_single = len(given) == 1 and not target._schema.name.endswith("backward")
        if not is_single and not (argument.has_default_value() and list(given) == argument.default_value):
            return f"a list of {len(given)} and not of {argument.N}"
    return None


def _real_type(argument: Any) -> str:
    return str(argument.real_type).removeprefix("Optional[").removesuffix("]")


@cache
def _takes_device(func: Any) -> bool:
    return isinstance(func, OpOverload) and any(argument.name == "device" for argument in func._schema.arguments)


def _further_results(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many tensors an operator gives that cuts one into pieces, or how often one runs its body."""
    if isinstance(func, HigherOrderOperator):
        return _rounds(args) if is_loop(func) else 0
    if (
        not isinstance(func, OpOverload)
        or func._schema.name not in _CUTS
        or not args
        or not isinstance(args[0], Tensor)
    ):
        return 0
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    dimension, size = given.get("dim", 0), given.get("split_size", 1)
    if not -args[0].dim() <= dimension < args[0].dim() or not isinstance(size, int):
        return 0
    return int(hint_of(args[0].shape[dimension])) // max(size, 1)


_CUTS = frozenset(f"aten::{name}" for name in ("split", "split_copy", "unbind", "unbind_copy", "unsafe_split"))
#: Higher-order operators that run a body for each item of a tensor, also on tensors without memory.
_LOOPS = frozenset(("associative_scan", "map_impl", "scan"))


def _rounds(args: Sequence[Any]) -> int:
    """An upper bound: the largest size of an operand, for each node of the bodies."""
    operands = [one for given in args for one in (given if isinstance(given, tuple | list) else (given,))]
    sizes = (int(hint_of(size)) for one in operands if isinstance(one, Tensor) for size in one.shape)
    nodes = sum(len(body.graph.nodes) for body in args if isinstance(body, torch.fx.GraphModule))
    return max(sizes, default=0) * max(nodes, 1)
