"""The context in which a compiler runs: the modes of the call, without what would break a trace, and restored after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from partita._torch.functorch import close_dual_level, close_levels, count_levels
from partita._torch.modes import in_forward_mode, read_ambient, restore_after_error, restore_autocast
from partita._torch.operator_schemas import base_name
from partita.errors import BackendError


@contextmanager
def compiler_scope() -> Iterator[None]:
    """Inside, inference mode is no_grad, since inference tensors cannot be traced.

    Modes, RNG states and the default dtype are restored after it.
    """
    found, dtype = read_ambient(), torch.get_default_dtype()
    hooks = torch._C._autograd
    # Saved-tensor hooks are the user's: they expect tensors with data.
    traced = hooks._saved_tensors_hooks_set_tracing(True)
    try:
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.random.fork_rng(devices=_devices()))
            stack.enter_context(IdentityDropout())
            stack.enter_context(IdentityExpand())
            if found.inference:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            yield
        # A compiler may leave modes changed also where it succeeds.
        if read_ambient() != found:
            torch.set_grad_enabled(found.grad)
            restore_autocast(found)
        # So does a body that enters a transform which another one leaves.
        if count_levels() > found.levels:
            close_levels(found.levels)
            _close_dual_level_of_graph()
    except BaseException as error:
        has_open_levels = count_levels() > found.levels
        restore_after_error(found, error)
        if has_open_levels:
            _close_dual_level_of_graph()
        raise
    finally:
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        hooks._saved_tensors_hooks_set_tracing(traced)


def _close_dual_level_of_graph() -> None:
    """Closes the level of forward-mode AD that a graph has left open; one that the caller is in stays open."""
    # Graphs open it by a function that does not count the level for Python, as `forward_ad.dual_level` does.
    if not in_forward_mode():
        close_dual_level()


def _devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


class IdentityExpand(TorchFunctionMode):
    """Replaces an `expand` that is an identity by a plain view.

    Functionalization (torch 2.13) maps a mutation of an expanded tensor back to `x + (written - x)`, which rounds, and
    makes 0.0 of -0.0. Eager mode forbids mutation where an element is repeated, so only identities matter.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EXPANDING and args and isinstance(args[0], Tensor) and _is_identity(args[0], result):
            return args[0].view(result.shape)
        return result


def _is_identity(source: Tensor, expanded: Tensor) -> bool:
    """Whether only axes of size 1 were added; symbols get no guards."""
    added = expanded.ndim - source.ndim
    new, old = expanded.shape[:added], expanded.shape[added:]
    return all(type(size) is int and size == 1 for size in new) and all(map(_is_known_equal, source.shape, old))


def _is_known_equal(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return type(one) is int and type(other) is int and one == other


_EXPANDING = frozenset(
    (
        Tensor.broadcast_to,
        Tensor.expand,
        Tensor.expand_as,
        torch.broadcast_to,
        torch.ops.aten.broadcast_to.default,
        torch.ops.aten.expand.default,
        torch.ops.aten.expand_as.default,
    )
)


class IdentityDropout(TorchFunctionMode):
    """Replaces a dropout outside of training by its input, and one that drops everything by a product with zero.

    Functionalization (torch 2.13) assumes that the output of `torch.dropout(x, p, train=False)` does not alias `x`, so
    that a mutation would not reach `x`. A trace generates random numbers for p=1, eager mode multiplies by zero.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        flag = _TRAINING.get(func)
        if flag is not None:
            arguments = _DEFAULTS.get(func, {}) | dict(zip(("input", "p", flag, "inplace"), args, strict=False)) | named
            if "input" not in arguments:
                return func(*args, **named)
            value, training = arguments["input"], arguments.get(flag)
            if training is False:
                return value
            if training is True and drops_all(arguments.get("p")) and not arguments.get("inplace"):
                return value * value.new_zeros(())
        return func(*args, **named)


#: The functions, and the name of their third argument.
_TRAINING = {
    functional.dropout: "training",
    torch.dropout: "train",
    torch.ops.aten.dropout: "train",
    torch.ops.aten.dropout.default: "train",
}
_DEFAULTS = {functional.dropout: {"p": 0.5, "training": True}}


def drops_all(p: Any) -> bool:
    """Whether dropout with this probability drops everything; symbols get no guards."""
    return isinstance(p, int | float) and p == 1


#: Losses whose decomposition (torch 2.13) computes other values than their kernels.
MISCOMPUTED = frozenset(("multilabel_margin_loss", "multilabel_margin_loss_forward"))


class WrongWhenTraced(TorchFunctionMode):
    """Raises a `BackendError` at a call whose dropout a trace would lose, or that it would compute wrongly.

    The decompositions of recurrent networks (torch 2.13) omit the dropout between layers.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if loses_dropout(func, args, named):
            raise BackendError(f"{base_name(func)} drops values in training, and a trace would lose that")
        if base_name(func) in MISCOMPUTED:
            raise BackendError(f"{base_name(func)} has another value when it is traced")
        return func(*args, **named)


def loses_dropout(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a trace of this call drops nothing where eager mode does; arguments that are nodes count as true."""
    name = base_name(target)
    if name in _RECURRENT:
        arguments = _recurrent_arguments(name, args, kwargs)
        layers, dropout, train = (arguments.get(key) for key in ("num_layers", "dropout", "train"))
        return _may_exceed(layers, 1) and _may_exceed(dropout, 0) and (isinstance(train, Node) or bool(train))
    if name == "native_dropout":
        # Its kernels treat None as True, its decomposition as False.
        arguments = dict(zip(("input", "p", "train"), args, strict=False)) | dict(kwargs)
        return arguments.get("train") is None
    return False


_RECURRENT = frozenset(("gru", "rnn_relu", "rnn_tanh"))


def _recurrent_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a recurrent network by name: of packed sequences, or of tensors."""
    packet = getattr(torch.ops.aten, name)
    # Only packed sequences have their weights, which are a list, behind three tensors.
    packed = "batch_sizes" in kwargs or (len(args) > 3 and isinstance(args[3], list | tuple))
    names = (argument.name for argument in (packet.data if packed else packet.input)._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _may_exceed(value: Any, bound: float) -> bool:
    return isinstance(value, Node) or (isinstance(value, int | float) and value > bound)
