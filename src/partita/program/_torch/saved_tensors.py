"""Dry runs of calls that find what they save for backward and what they allocate, and count their FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from partita._torch.dry_runs import Allowance, is_torchs, on_meta, refusal_of_call, refusal_of_device
from partita._torch.fake_tensors import muted
from partita._torch.modes import fresh_modes
from partita._torch.operator_schemas import is_composite, storage_key
from partita._torch.pytrees import leaves_of, map_tensors, tensors_in
from partita._torch.symbolic_shapes import hint_of

#: Dynamo does not trace this module: its code runs around bodies, after a graph break.
DYNAMO_SKIPS = True


def allocated_tensors(function: Any, args: Any, kwargs: Any, *, allowance: Allowance) -> list[Tensor] | None:
    """A tensor for each storage that a call on fake tensors allocates; None if unknown.

    The tensors are the traced values of a program, so what mutates an argument, or resizes `out`, is not called.
    """
    if not is_torchs(function) or refusal_of_call(function, args, kwargs) is not None or _mutates(function):
        return None
    if refusal_of_device((args, kwargs)) is not None:
        return None
    leaves = tensors_in((args, kwargs))
    modes = {id(mode): mode for leaf in leaves if (mode := getattr(leaf, "fake_mode", None)) is not None}
    if len(modes) != 1:
        return None
    (fake_mode,) = modes.values()
    try:
        with fake_mode, torch.enable_grad(), _AllocationRecorder(allowance) as recorder:
            function(*args, **kwargs)
    except Exception:  # A function may reject fake tensors with any error.
        return None
    inputs = set(map(storage_key, leaves))
    return [tensor for key, tensor in recorder.found.items() if key not in inputs]


def _mutates(function: Any) -> bool:
    return isinstance(function, OpOverload) and function._schema.is_mutable


class _AllocationRecorder(TorchDispatchMode):
    """Keeps one result for each storage."""

    def __init__(self, allowance: Allowance) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allowance = allowance
        self.found: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._allowance.spend(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        for leaf in leaves_of(result):
            if isinstance(leaf, Tensor):
                self.found.setdefault(storage_key(leaf), leaf)
        return result


# Dry runs of single calls on meta tensors.


def flops_of_call(function: Any, args: Any, kwargs: Any) -> int:
    """The FLOPs of the operators that a call decomposes into; raises what the call raises."""
    monitor = OperatorMonitor(_ignore, Allowance(_CALLS), makes_meta=True)
    with isolated_from_caller(grad=False), monitor:
        function(*args, **kwargs)
    return monitor.flops


#: The most operators that a product may decompose into.
_CALLS = 10_000


def flops_until_saved(op: str, target: Any, args: Any, kwargs: Any, *, allowance: Allowance) -> int | None:
    """The FLOPs done when a call saves its last tensor; None if it saves nothing.

    Raises what the call raises. All tensors that can require gradients are assumed to.
    """
    done: list[int] = []
    monitor = OperatorMonitor(_ignore, allowance, makes_meta=True)
    with isolated_from_caller(grad=True), intercept_saved_tensors(lambda _: done.append(monitor.flops)), monitor:
        args, kwargs = map_tensors(_with_gradient, (args, kwargs))
        if op == "call_method":
            getattr(args[0], target)(*args[1:], **kwargs)
        else:
            target(*args, **kwargs)
    return done[-1] if done else None


def _with_gradient(tensor: Tensor) -> Tensor:
    """A tensor that requires a gradient and is no leaf, since autograd forbids in-place mutation of leaves."""
    can_have_one = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_().clone() if can_have_one else tensor


def _ignore(result: Any, *, is_cast: bool) -> None:
    """Ignores the result of an operator."""


# Monitoring operators below autograd.


class OperatorMonitor(TorchDispatchMode):
    """Counts the FLOPs of operators as torch does, and calls `on_result` with their results, except views.

    With `is_cast`, autocast may have inserted the operator for the next one.
    Raises if the operators exceed `allowance`. With `makes_meta`, factories make meta tensors.
    """

    supports_higher_order_operators = True

    def __init__(self, on_result: Callable[..., object], allowance: Allowance, *, makes_meta: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._on_result = on_result
        self._allowance = allowance
        self._makes_meta = makes_meta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            self._allowance.spend(func, args, kwargs)
            self.flops += self._flops_of_branches(func, args)
            result = func(*args, **kwargs)
            self._on_result(result, is_cast=False)
            return result
        if func.namespace == "prim":  # Device queries of fake tensors, which are frequent.
            return func(*args, **kwargs)
        self._allowance.spend(func, args, kwargs)
        if self._makes_meta:
            args, kwargs = on_meta(func, args, kwargs)
        formula = flop_formula(func)
        if formula is None and is_composite(func):
            with self:  # Without autograd, in inference mode, composite operators arrive undecomposed.
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        for statistics in updated_statistics(func, args, kwargs):
            increment_version(statistics)  # torch does not bump the version for this mutation.
        if formula is not None:
            self.flops += int(hint_of(formula(*args, **kwargs, out_val=result)))
        if not _returns_views(func):
            self._on_result(result, is_cast=is_differentiable_cast(func, args) and is_inside_autocast())
        return result

    def _flops_of_branches(self, func: Any, args: Any) -> int:
        """The FLOPs of the costlier branch, as in torch's counter; bodies of other operators are not counted."""
        if func is not torch.ops.higher_order.cond:
            return 0
        _, *branches, operands = args
        return max(self._flops_of_branch(branch, operands) for branch in branches)

    def _flops_of_branch(self, branch: Callable[..., Any], operands: Any) -> int:
        before, on_result = self.flops, self._on_result
        self._on_result = _ignore  # The result of a branch is not that of the operator.
        try:
            with self:
                branch(*operands)
            return self.flops - before
        finally:
            self.flops, self._on_result = before, on_result


def is_differentiable_cast(func: Any, args: Any) -> bool:
    """Whether an operator is a cast, or another copy, of a tensor that requires gradients."""
    return func is torch.ops.aten._to_copy.default and bool(args[0].requires_grad)


def is_inside_autocast() -> bool:
    """Whether a block of autocast is open; whether it is enabled cannot be queried below autograd."""
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting() > 0)


@cache
def returns_only_views(target: Any) -> bool:
    """Whether an operator of torch mutates nothing and returns views of its inputs, or copies if it must."""
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    returns = target._schema.returns
    return bool(returns) and all(result.alias_info is not None for result in returns)


def flop_formula(target: Any) -> Callable[..., Any] | None:
    """torch's formula for the FLOPs of an operator, by its arguments and its result `out_val`; None if it has none."""
    packet = getattr(target, "overloadpacket", target)
    if not isinstance(packet, Hashable):
        return None
    formula: Callable[..., Any] | None = flop_registry.get(packet) or flop_registry.get(_ATTENTION_LIKE.get(packet))
    return formula


_aten: Any = torch.ops.aten
#: torch 2.13 has attention formulas for accelerators only; one that a user registers comes first.
_ATTENTION_LIKE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


def updated_statistics(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The running statistics that a norm mutates in training, which its schema does not declare."""
    places = _places_of_statistics(func)
    if not places:
        return []
    values = {name: args[place] if place < len(args) else kwargs.get(name) for name, place in places.items()}
    tensors = [values["running_mean"], values["running_var"]] if values.get("training", True) else []
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


@cache
def _places_of_statistics(func: Any) -> dict[str, int]:
    arguments = {argument.name: place for place, argument in enumerate(func._schema.arguments)}
    if func._schema.is_mutable or not arguments.keys() >= {"running_mean", "running_var"}:
        return {}
    return {name: arguments[name] for name in ("running_mean", "running_var", "training") if name in arguments}


@cache
def _returns_views(func: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


# Isolation of a dry run from the caller.


@contextmanager
def isolated_from_caller(*, grad: bool) -> Iterator[None]:
    """Inside, no tracer is active, autocast and inference mode are off, and the RNG state is restored afterwards."""
    with ExitStack() as stack:
        stack.enter_context(muted("torch._subclasses.fake_tensor"))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(fresh_modes(grad=grad))
        yield


@contextmanager
def intercept_saved_tensors(pack: Callable[[Tensor], object]) -> Iterator[None]:
    """Inside, autograd saves the result of `pack` instead of each tensor; no backward can follow."""
    autograd: Any = torch._C._autograd
    traced = autograd._saved_tensors_hooks_set_tracing(False)  # An outer tracer may have disabled hooks.
    try:
        with saved_tensors_hooks(pack, _no_backward):
            yield
    finally:
        autograd._saved_tensors_hooks_set_tracing(traced)


def _no_backward(packed: object) -> Tensor:
    raise AssertionError(f"a dry run has no backward: {packed!r}")
