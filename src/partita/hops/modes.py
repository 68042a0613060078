"""Operators that run a body under a mode, and restore the previous mode afterwards, after errors too.

A call takes the arguments of the mode, the body, and the arguments of the body. All keywords are passed to the body,
but for those that name a leading argument which is not passed by position. The names are those of torch's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar, overload

import torch

from partita._torch import operator_schemas as torch_operators
from partita._torch.modes import Tracing, can_autocast, variable_set
from partita.errors import OptionError
from partita.hops._torch.operator import BodyOperator, PlainBodyOperator, SwitchOperator, registered

#: Dynamo must not compile the code of this module, which runs around a body after a graph break inside it.
DYNAMO_SKIPS = True


_Result = TypeVar("_Result")


class _Call(PlainBodyOperator):
    """`(body, *operands, **keywords)`: calls the body, as a region of a graph; Dynamo inlines it."""

    def meaning(self, *mode: Any) -> AbstractContextManager[Callable[..., Any]]:
        return nullcontext(call_body)


class Wrap(PlainBodyOperator):
    """`(func, *args, **kwargs)`: calls the function, as one unit of a graph, Dynamo's too."""

    parameters = ("func",)
    dynamo_rule = "wrapped"


class WrapWithSetGradEnabled(SwitchOperator):
    """`(enable_grad, wrapped_func, *args, **kwargs)`: calls the function with gradients switched on or off."""

    parameters = ("enable_grad", "wrapped_func")

    def check(self, *mode: Any) -> None:
        check_flag("enable_grad", *mode)

    def scope(self, *mode: Any, tracing: Tracing) -> AbstractContextManager[Any]:
        return grad_scope(*mode, tracing=tracing)

    def meaning(self, *mode: Any) -> AbstractContextManager[Callable[..., Any]]:
        return nullcontext(call_without_gradients if stands_for_inference() else call_with_gradients)


class WrapWithAutocast(BodyOperator):
    """`(device_type, dtype, enabled, cache_enabled, wrapped_func, *args, **kwargs)`: calls it under autocast."""

    parameters = ("device_type", "dtype", "enabled", "cache_enabled", "wrapped_func")

    @overload
    def __call__(
        self,
        device_type: str,
        dtype: torch.dtype | None,
        enabled: bool,  # noqa: FBT001
        cache_enabled: bool | None,  # noqa: FBT001
        wrapped_func: Callable[..., _Result],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> _Result: ...

    @overload
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def check(self, *mode: Any) -> None:
        check_autocast(*mode)

    def scope(self, *mode: Any, tracing: Tracing) -> AbstractContextManager[Any]:
        device_type, dtype, enabled, cache_enabled = mode
        # A cached cast is a tensor that the tracer does not know.
        return torch.autocast(device_type, dtype, enabled, cache_enabled if tracing is Tracing.NOT else False)

    def meaning(self, *mode: Any) -> AbstractContextManager[Callable[..., Any]]:
        return nullcontext(call_under_autocast)


class _InferenceMode(SwitchOperator):
    """`(mode, body, *operands, **keywords)`: calls the body in inference mode or out of it."""

    parameters = ("mode", "body")

    def check(self, *mode: Any) -> None:
        check_flag("mode", *mode)

    def scope(self, *mode: Any, tracing: Tracing) -> AbstractContextManager[Any]:
        if tracing is Tracing.NOT:
            return torch.inference_mode(*mode)
        return traced_inference_scope(*mode, tracing=tracing)

    @contextmanager
    def meaning(self, *mode: Any) -> Iterator[Callable[..., Any]]:
        # After Dynamo, AOTAutograd fails on views in an inference block, and export drops the block silently.
        is_lost = any(mode) or torch.compiler.is_exporting()
        with standing_for_inference(*mode):
            yield call_as_if_in_inference_mode if is_lost else call_in_inference_mode


_HOME = "partita.hops"

call = registered(_Call, "partita_call", home=(_HOME, "call"))
wrap = registered(Wrap, "partita_wrap", home=(_HOME, "wrap"), twin=torch_operators.WRAP)
wrap_with_set_grad_enabled = registered(
    WrapWithSetGradEnabled,
    "partita_set_grad_enabled",
    home=(_HOME, "wrap_with_set_grad_enabled"),
    twin=torch_operators.WRAP_WITH_SET_GRAD_ENABLED,
)
wrap_with_autocast = registered(
    WrapWithAutocast, "partita_autocast", home=(_HOME, "wrap_with_autocast"), twin=torch_operators.WRAP_WITH_AUTOCAST
)
wrap_with_inference_mode = registered(
    _InferenceMode, "partita_inference_mode", home=(_HOME, "wrap_with_inference_mode")
)


_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "maia", "privateuseone")


def check_flag(name: str, value: Any) -> None:
    """Raises unless `value` is True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {value!r}")


def check_autocast(device_type: Any, dtype: Any, enabled: Any, cache_enabled: Any) -> None:
    """Raises unless torch.autocast can take these arguments."""
    if not isinstance(device_type, str) or not can_autocast(device_type):
        known = ", ".join(filter(can_autocast, _DEVICE_TYPES))
        raise OptionError(f"autocast knows no device type {device_type!r}; it knows {known}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise OptionError(f"dtype must be a torch.dtype, or None for the one set for {device_type!r}, not {dtype!r}")
    check_flag("enabled", enabled)
    if cache_enabled is not None:
        check_flag("cache_enabled", cache_enabled)


# The meaning of each operator in plain Python: Dynamo traces these in place of a call.


def call_body(body: Callable[..., Any], /, *operands: Any, **keywords: Any) -> Any:
    return body(*operands, **keywords)


def call_with_gradients(enabled: Any, body: Callable[..., Any], /, *operands: Any, **keywords: Any) -> Any:
    with torch.set_grad_enabled(enabled):
        return body(*operands, **keywords)


def call_without_gradients(enabled: Any, body: Callable[..., Any], /, *operands: Any, **keywords: Any) -> Any:
    """For inference mode, in which `enabled` has no effect."""
    return body(*operands, **keywords)


def call_under_autocast(
    device_type: Any,
    dtype: Any,
    enabled: Any,
    cache_enabled: Any,
    body: Callable[..., Any],
    /,
    *operands: Any,
    **keywords: Any,
) -> Any:
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        return body(*operands, **keywords)


def call_in_inference_mode(mode: Any, body: Callable[..., Any], /, *operands: Any, **keywords: Any) -> Any:
    with torch.inference_mode(mode):
        return body(*operands, **keywords)


def call_as_if_in_inference_mode(mode: Any, body: Callable[..., Any], /, *operands: Any, **keywords: Any) -> Any:
    """The values and gradients of inference mode, in tensors that any tracer can follow."""
    with torch.set_grad_enabled(not mode):
        return body(*operands, **keywords)


#: Whether a traced body represents one that runs in inference mode.
_STANDS_FOR_INFERENCE: ContextVar[bool] = ContextVar("stands_for_inference", default=False)


def grad_scope(enabled: bool, *, tracing: Tracing) -> AbstractContextManager[Any]:  # noqa: FBT001
    """Gradients on or off; they stay off in inference mode, and in an export that lowers a program without them.

    AOTAutograd in torch 2.13 raises an IndexError where such an export switches gradients on.
    """
    is_lowered_without = tracing is Tracing.OPEN and torch.compiler.is_exporting() and not torch.is_grad_enabled()
    if enabled and (is_lowered_without or stands_for_inference()):
        return nullcontext()
    # `set_grad_enabled` would switch the mode on construction; these do on entry.
    return torch.enable_grad() if enabled else torch.no_grad()


@contextmanager
def traced_inference_scope(mode: bool, *, tracing: Tracing) -> Iterator[None]:  # noqa: FBT001
    """Inference mode as a tracer can follow it: without gradients, since inference tensors cannot be traced."""
    with standing_for_inference(mode), grad_scope(not mode, tracing=tracing):
        yield


def standing_for_inference(mode: bool) -> AbstractContextManager[None]:  # noqa: FBT001
    """Inside, gradients cannot be switched on if `mode` is True: in inference mode that would have no effect."""
    return variable_set(_STANDS_FOR_INFERENCE, mode)


def stands_for_inference() -> bool:
    """Whether what is traced now would run in inference mode."""
    return _STANDS_FOR_INFERENCE.get()
