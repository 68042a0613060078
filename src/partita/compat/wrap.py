"""A drop-in replacement for `torch._higher_order_ops.wrap`: the operators that run a body, and their classes.

Here they restore the mode after an error, and a checkpoint's gradients are those of the plain body, in eager too. In a
graph, `wrap` and the operators of modes compare equal to torch's of the same name, so a search for one finds both.
"""

from partita.hops import wrap, wrap_with_autocast, wrap_with_set_grad_enabled
from partita.hops.modes import Wrap, WrapWithAutocast, WrapWithSetGradEnabled
from partita.recompute import tag_activation_checkpoint, wrap_activation_checkpoint
from partita.recompute.operators import TagActivationCheckpoint, WrapActivationCheckpoint

__all__ = [
    "TagActivationCheckpoint",
    "Wrap",
    "WrapActivationCheckpoint",
    "WrapWithAutocast",
    "WrapWithSetGradEnabled",
    "tag_activation_checkpoint",
    "wrap",
    "wrap_activation_checkpoint",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
]
