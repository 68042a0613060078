"""Operators with a body: a region as one call, and regions that run under a grad, inference or autocast mode."""

from partita._torch.dynamo_operators import inline_in_dynamo
from partita.hops.operators import (
    call,
    wrap,
    wrap_with_autocast,
    wrap_with_inference_mode,
    wrap_with_set_grad_enabled,
)

__all__ = ["call", "wrap", "wrap_with_autocast", "wrap_with_inference_mode", "wrap_with_set_grad_enabled"]

inline_in_dynamo((call, wrap, wrap_with_autocast, wrap_with_inference_mode, wrap_with_set_grad_enabled))
