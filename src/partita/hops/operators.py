"""The operators themselves: each runs a body under its mode and restores what was there, after errors too.

Whatever follows the arguments of the mode is the body and what it is called with; every keyword is the body's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from partita._torch.body_operators import BodyOperator, registered
from partita._torch.tracing_state import Tracing
from partita.hops import meanings
from partita.hops.arguments import check_autocast, check_flag
from partita.hops.scopes import grad_scope, standing_for_inference, stands_for_inference, traced_inference_scope

__all__ = ["call", "wrap", "wrap_with_autocast", "wrap_with_inference_mode", "wrap_with_set_grad_enabled"]

_Result = TypeVar("_Result")


class _Call(BodyOperator):
    """`(body, *operands, **keywords)`: calls the body, as one unit of a graph."""

    def __call__(self, body: Callable[..., _Result], /, *operands: Any, **keywords: Any) -> _Result:
        result: _Result = self.enact((), body, operands, keywords)
        return result

    def meaning(self, *mode: Any) -> AbstractContextManager[Callable[..., Any]]:
        return nullcontext(meanings.call_body)


class _SetGradEnabled(BodyOperator):
    """`(enabled, body, *operands, **keywords)`: calls the body with gradients switched on or off."""

    mode_count = 1

    def __call__(
        self,
        enabled: bool,  # noqa: FBT001  The signature is that of torch's operator.
        body: Callable[..., _Result],
        /,
        *operands: Any,
        **keywords: Any,
    ) -> _Result:
        result: _Result = self.enact((enabled,), body, operands, keywords)
        return result

    def check(self, *mode: Any) -> None:
        check_flag("enabled", *mode)

    def scope(self, *mode: Any, tracing: Tracing) -> AbstractContextManager[Any]:
        return grad_scope(*mode, tracing=tracing)

    def meaning(self, *mode: Any) -> AbstractContextManager[Callable[..., Any]]:
        return nullcontext(meanings.call_without_gradients if stands_for_inference() else meanings.call_with_gradients)


class _Autocast(BodyOperator):
    """`(device_type, dtype, enabled, cache_enabled, body, *operands, **keywords)`: calls the body under autocast."""

    mode_count = 4

    def __call__(
        self,
        device_type: str,
        dtype: torch.dtype | None,
        enabled: bool,  # noqa: FBT001
        cache_enabled: bool | None,  # noqa: FBT001
        body: Callable[..., _Result],
        /,
        *operands: Any,
        **keywords: Any,
    ) -> _Result:
        result: _Result = self.enact((device_type, dtype, enabled, cache_enabled), body, operands, keywords)
        return result

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

    mode_count = 1

    def __call__(
        self,
        mode: bool,  # noqa: FBT001
        body: Callable[..., _Result],
        /,
        *operands: Any,
        **keywords: Any,
    ) -> _Result:
        result: _Result = self.enact((mode,), body, operands, keywords)
        return result

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

call = registered(_Call, "partita_call", home=_HOME, exported_as="call")
wrap = registered(_Call, "partita_wrap", home=_HOME, exported_as="wrap")
wrap_with_set_grad_enabled = registered(
    _SetGradEnabled, "partita_set_grad_enabled", home=_HOME, exported_as="wrap_with_set_grad_enabled"
)
wrap_with_autocast = registered(_Autocast, "partita_autocast", home=_HOME, exported_as="wrap_with_autocast")
wrap_with_inference_mode = registered(
    _InferenceMode, "partita_inference_mode", home=_HOME, exported_as="wrap_with_inference_mode"
)
