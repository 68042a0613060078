"""Targets that live as long as the process, so that what is known of them may be kept as long."""

from __future__ import annotations

import sys
from types import BuiltinFunctionType
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

__all__ = ["is_lasting"]


def is_lasting(target: Any) -> bool:
    """Whether `target` is an operator, a builtin, or a function that its module still holds; a closure is not."""
    if isinstance(target, OpOverload | OpOverloadPacket | BuiltinFunctionType):
        return True
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    name = getattr(target, "__qualname__", None)
    return module is not None and name is not None and getattr(module, name, None) is target
