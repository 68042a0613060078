"""torch's own operators that run a body as one unit, or under a mode."""

from __future__ import annotations

from torch._higher_order_ops.wrap import wrap, wrap_with_autocast, wrap_with_set_grad_enabled
from torch.fx.node import has_side_effect

__all__ = ["WRAP", "WRAP_WITH_AUTOCAST", "WRAP_WITH_SET_GRAD_ENABLED"]

WRAP = wrap
WRAP_WITH_AUTOCAST = wrap_with_autocast
#: It leaves its mode switched when its body raises (seen in torch 2.13), so whoever calls it puts that back.
WRAP_WITH_SET_GRAD_ENABLED = wrap_with_set_grad_enabled

for _operator in (WRAP, WRAP_WITH_AUTOCAST, WRAP_WITH_SET_GRAD_ENABLED):
    # torch takes them for pure, so its dead-code elimination would delete a body that only writes (torch 2.13).
    has_side_effect(_operator)  # type: ignore[arg-type]
