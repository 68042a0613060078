"""Operators with a body: a region as one call, under a grad, inference or autocast mode, or recomputed in backward."""

from partita.hops._torch.hop_rules import tell_dynamo
from partita.hops.modes import call, wrap, wrap_with_autocast, wrap_with_inference_mode, wrap_with_set_grad_enabled
from partita.recompute.operators import keep, tag_activation_checkpoint, wrap_activation_checkpoint

__all__ = [
    "call",
    "keep",
    "tag_activation_checkpoint",
    "wrap",
    "wrap_activation_checkpoint",
    "wrap_with_autocast",
    "wrap_with_inference_mode",
    "wrap_with_set_grad_enabled",
]


tell_dynamo(
    (
        call,
        keep,
        tag_activation_checkpoint,
        wrap,
        wrap_activation_checkpoint,
        wrap_with_autocast,
        wrap_with_inference_mode,
        wrap_with_set_grad_enabled,
    )
)
