"""torch's `torch._higher_order_ops.wrap`: the operators that run a body.

Here they restore the mode after an error, and a checkpoint's gradients are those of the plain body, in eager too.
"""

from partita.hops import (
    tag_activation_checkpoint,
    wrap,
    wrap_activation_checkpoint,
    wrap_with_autocast,
    wrap_with_set_grad_enabled,
)

__all__ = [
    "tag_activation_checkpoint",
    "wrap",
    "wrap_activation_checkpoint",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
]
