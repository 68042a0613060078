"""What each operator means in plain Python, which is how Dynamo traces a call of it once its mode is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "call_as_if_in_inference_mode",
    "call_body",
    "call_in_inference_mode",
    "call_under_autocast",
    "call_with_gradients",
    "call_without_gradients",
]


def call_body(body: Callable[..., Any], /, *operands: Any, **keywords: Any) -> Any:
    return body(*operands, **keywords)


def call_with_gradients(enabled: Any, body: Callable[..., Any], /, *operands: Any, **keywords: Any) -> Any:
    with torch.set_grad_enabled(enabled):
        return body(*operands, **keywords)


def call_without_gradients(enabled: Any, body: Callable[..., Any], /, *operands: Any, **keywords: Any) -> Any:
    """Where none can flow, whatever `enabled` says."""
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
