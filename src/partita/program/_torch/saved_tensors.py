"""What autograd saves: hooks, trial runs, operators and storages seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from partita._torch.dry_runs import Allowance, is_composite, is_torchs, on_meta, refusal_of_call
from partita._torch.fake_sandbox import Tracing, _quiet, map_tensors, tracing_now
from partita._torch.modes import fresh_modes
from partita._torch.operators.schemas import storage_key
from partita._torch.symbolic_shapes import hint_of

__all__ = [
    "OperatorWatch",
    "allocated_tensors",
    "apart_from_the_caller",
    "around_hooks",
    "but_for_traces",
    "flops_of_call",
    "flops_until_saved",
    "gives_only_views",
    "hooks_at_work",
    "saving_into",
]

#: Dynamo leaves the code of this module to Python: it runs around bodies, of which a break has ended the graph.
DYNAMO_SKIPS = True


# What memory a function makes, seen on tensors that have none.


def allocated_tensors(function: Any, args: Any, kwargs: Any, *, allowance: Allowance) -> list[Tensor] | None:
    """A tensor for each storage that a call on fake tensors makes; None where that is not known."""
    if not is_torchs(function) or refusal_of_call(function, args, kwargs) is not None:
        return None
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    modes = {id(mode): mode for leaf in leaves if (mode := getattr(leaf, "fake_mode", None)) is not None}
    if len(modes) != 1:
        return None
    (fake_mode,) = modes.values()
    try:
        with fake_mode, torch.enable_grad(), _Seeing(allowance) as seen:
            function(*args, **kwargs)
    except Exception:  # A function may refuse tensors without memory in any way.
        return None
    given = set(map(storage_key, leaves))
    return [tensor for key, tensor in seen.found.items() if key not in given]


class _Seeing(TorchDispatchMode):
    def __init__(self, allowance: Allowance) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allowance = allowance
        self.found: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._allowance.spend(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.found.setdefault(storage_key(leaf), leaf)
        return result


# The hooks by which autograd packs a tensor that it saves, and unpacks it: which are at work, and coming between.


_Pack = Callable[[Tensor], Any]
_Unpack = Callable[[Any], Tensor]


def hooks_at_work() -> tuple[_Pack, _Unpack] | None:
    """What packs and unpacks the tensors that autograd saves now; None where it holds them itself."""
    found: tuple[_Pack, _Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def around_hooks(
    pack: Callable[[_Pack, Tensor], Any], unpack: Callable[[_Unpack, Any], Tensor] | None = None
) -> AbstractContextManager[Any]:
    """Inside, `pack` and `unpack` are called in the place of the hooks at work, and given these, if there are any."""
    hooks = hooks_at_work()
    if hooks is None:
        return nullcontext()
    return saved_tensors_hooks(partial(pack, hooks[0]), hooks[1] if unpack is None else partial(unpack, hooks[1]))


def but_for_traces() -> AbstractContextManager[Any]:
    """Inside, the hooks at work see nothing of what an operator traces when it is called, as `scan` does (torch 2.13).

    It traces its body with its backward, and a checkpoint would run the whole region again in the midst of the trace.
    """
    return around_hooks(_pack_real, _unpack_real)


class _Traced:
    """A tensor without data that a trace saves."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _pack_real(pack: _Pack, tensor: Tensor) -> Any:
    return pack(tensor) if tracing_now() is Tracing.NOT else _Traced(tensor)


def _unpack_real(unpack: _Unpack, packed: Any) -> Tensor:
    return packed.tensor if isinstance(packed, _Traced) else unpack(packed)


# Trials of single calls on tensors without memory: what they compute, and when autograd saves something for them.


def flops_of_call(function: Any, args: Any, kwargs: Any) -> int:
    """The FLOPs of the operators that a call comes down to; raises what the call raises."""
    watch = OperatorWatch(_ignore, Allowance(_CALLS), makes_meta=True)
    with apart_from_the_caller(grad=False), watch:
        function(*args, **kwargs)
    return watch.flops


#: The most operators that a product may come down to.
_CALLS = 10_000


def flops_until_saved(op: str, target: Any, args: Any, kwargs: Any, *, allowance: Allowance) -> int | None:
    """The FLOPs that are done when a call saves something for the last time; None if it saves nothing.

    Raises what the call raises. All tensors that can have gradients are taken to have them.
    """
    done: list[int] = []
    watch = OperatorWatch(_ignore, allowance, makes_meta=True)
    with apart_from_the_caller(grad=True), saving_into(lambda _: done.append(watch.flops)), watch:
        args, kwargs = map_tensors(_with_gradient, (args, kwargs))
        if op == "call_method":
            getattr(args[0], target)(*args[1:], **kwargs)
        else:
            target(*args, **kwargs)
    return done[-1] if done else None


def _with_gradient(tensor: Tensor) -> Tensor:
    """A tensor that has a history, since autograd lets nobody write to one that begins it."""
    can_have_one = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_().clone() if can_have_one else tensor


def _ignore(result: Any) -> None:
    """What an operator makes is of no interest here."""


# Watching operators from below autograd: what each of them makes, and how many FLOPs it takes as torch counts them.


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
        self._notice = _ignore_result
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


def _ignore_result(result: Any) -> None:
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


# Where a program is run to see what autograd saves: apart from the modes, hooks and random numbers of the caller.


@contextmanager
def apart_from_the_caller(*, grad: bool) -> Iterator[None]:
    """Inside, no tracer is at work, autocast and inference mode are off, and gradients are as asked."""
    with ExitStack() as stack:
        stack.enter_context(_quiet("torch._subclasses.fake_tensor"))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(fresh_modes(grad=grad))
        yield


@contextmanager
def saving_into(pack: Callable[[Tensor], object]) -> Iterator[None]:
    """Inside, autograd hands what it saves to `pack`, and holds what that gives instead; no backward can follow."""
    autograd: Any = torch._C._autograd
    traced = autograd._saved_tensors_hooks_set_tracing(False)  # A tracer around us may have switched hooks off.
    try:
        with saved_tensors_hooks(pack, _never):
            yield
    finally:
        autograd._saved_tensors_hooks_set_tracing(traced)


def _never(packed: object) -> Tensor:
    raise AssertionError(f"a run without data has no backward: {packed!r}")
