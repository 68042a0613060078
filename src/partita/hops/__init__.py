"""Operators with a body: a region as one call, or under a grad, inference or autocast mode."""

from partita.hops import delegate as _delegate  # noqa: F401  It defines an operator that files may name.
from partita.hops._torch.hop_rules import register_with_dynamo
from partita.hops.modes import call, wrap, wrap_with_autocast, wrap_with_inference_mode, wrap_with_set_grad_enabled

__all__ = ["call", "wrap", "wrap_with_autocast", "wrap_with_inference_mode", "wrap_with_set_grad_enabled"]


register_with_dynamo((call, wrap, wrap_with_autocast, wrap_with_inference_mode, wrap_with_set_grad_enabled))
