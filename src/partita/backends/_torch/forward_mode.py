"""Whether forward-mode AD is on."""

from __future__ import annotations

from torch.autograd import forward_ad


def in_forward_mode() -> bool:
    """Whether a level of forward-mode AD is open, in which tensors may have tangents."""
    return forward_ad._current_level >= 0
