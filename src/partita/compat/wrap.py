"""torch's `torch._higher_order_ops.wrap`: the operators that run a body, which here restore the mode after an error."""

from partita.hops import wrap, wrap_with_autocast, wrap_with_set_grad_enabled

__all__ = ["wrap", "wrap_with_autocast", "wrap_with_set_grad_enabled"]
