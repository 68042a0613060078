"""The operators themselves: each runs a body under its mode and restores what was there, after errors too.

Whatever follows the arguments of the mode is the body and what it is called with; every keyword is the body's, but for
those that name an argument up to the body which is not given by position. The names are those of torch's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, overload

import torch

from partita._torch import torch_operators
from partita._torch.body_operators import BodyOperator, registered
from partita._torch.tracing_state import Tracing
from partita.hops import meanings
from partita.hops.arguments import check_autocast, check_flag
from partita.hops.scopes import grad_scope, standing_for_inference, stands_for_inference, traced_inference_scope

__all__ = [
    "Wrap",
    "WrapWithAutocast",
    "WrapWithSetGradEnabled",
    "call",
    "wrap",
    "wrap_with_autocast",
    "wrap_with_inference_mode",
    "wrap_with_set_grad_enabled",
]

_Result = TypeVar("_Result")


class _Call(BodyOperator):
    """`(body, *operands, **keywords)`: calls the body, as a region of a graph; Dynamo looks into it."""

    @overload
    def __call__(self, body: Callable[..., _Result], /, *operands: Any, **keywords: Any) -> _Result: ...

    @overload
    def __call__(self, /, **keywords: Any) -> Any: ...

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        return self.enact(args, keywords)

    def meaning(self, *mode: Any) -> AbstractContextManager[Callable[..., Any]]:
        return nullcontext(meanings.call_body)


class Wrap(BodyOperator):
    """`(func, *args, **kwargs)`: calls the function, as one unit of a graph, Dynamo's too."""

    parameters = ("func",)
    dynamo_rule = "wrapped"

    @overload
    def __call__(self, func: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> _Result: ...

    @overload
    def __call__(self, /, **kwargs: Any) -> Any: ...

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.enact(args, kwargs)


class WrapWithSetGradEnabled(BodyOperator):
    """`(enable_grad, wrapped_func, *args, **kwargs)`: calls the function with gradients switched on or off."""

    parameters = ("enable_grad", "wrapped_func")

    @overload
    def __call__(
        self,
        enable_grad: bool,  # noqa: FBT001  The signature is that of torch's operator.
        wrapped_func: Callable[..., _Result],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> _Result: ...

    @overload
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.enact(args, kwargs)

    def check(self, *mode: Any) -> None:
        check_flag("enable_grad", *mode)

    def scope(self, *mode: Any, tracing: Tracing) -> AbstractContextManager[Any]:
        return grad_scope(*mode, tracing=tracing)

    def meaning(self, *mode: Any) -> AbstractContextManager[Callable[..., Any]]:
        return nullcontext(meanings.call_without_gradients if stands_for_inference() else meanings.call_with_gradients)


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
        return self.enact(args, kwargs)

    def check(self, *mode: Any) -> None:
        check_autocast(*mode)

    def scope(self, *mode: Any, tracing: Tracing) -> AbstractContextManager[Any]:
        device_type, dtype, enabled, cache_enabled = mode
        # A cast out of the cache is a tensor that no tracer has seen.
        return torch.autocast(device_type, dtype, enabled, cache_enabled if tracing is Tracing.NOT else False)

    def meaning(self, *mode: Any) -> AbstractContextManager[Callable[..., Any]]:
        return nullcontext(meanings.call_under_autocast)


class _InferenceMode(BodyOperator):
    """`(mode, body, *operands, **keywords)`: calls the body in inference mode or out of it."""

    parameters = ("mode", "body")

    @overload
    def __call__(
        self,
        mode: bool,  # noqa: FBT001
        body: Callable[..., _Result],
        /,
        *operands: Any,
        **keywords: Any,
    ) -> _Result: ...

    @overload
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.enact(args, kwargs)

    def check(self, *mode: Any) -> None:
        check_flag("mode", *mode)

    def scope(self, *mode: Any, tracing: Tracing) -> AbstractContextManager[Any]:
        if tracing is Tracing.NOT:
            return torch.inference_mode(*mode)
        return traced_inference_scope(*mode, tracing=tracing)

    @contextmanager
    def meaning(self, *mode: Any) -> Iterator[Callable[..., Any]]:
        # After Dynamo, AOTAutograd fails on views in an inference block, and export drops the block without a word.
        is_lost = any(mode) or torch.compiler.is_exporting()
        with standing_for_inference(*mode):
            yield meanings.call_as_if_in_inference_mode if is_lost else meanings.call_in_inference_mode


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
    WrapWithAutocast,
    "partita_autocast",
    home=(_HOME, "wrap_with_autocast"),
    twin=torch_operators.WRAP_WITH_AUTOCAST,
)
wrap_with_inference_mode = registered(
    _InferenceMode, "partita_inference_mode", home=(_HOME, "wrap_with_inference_mode")
)
