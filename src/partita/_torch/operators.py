"""Operators: what they are, and those that Partita itself writes into graphs."""

from __future__ import annotations

import torch
from torch._ops import OpOverload, OpOverloadPacket

__all__ = ["OPERATORS", "SYM_SIZE", "operator_names"]

#: The classes of the objects in `torch.ops`; they print as their qualified name.
OPERATORS = (OpOverload, OpOverloadPacket)

SYM_SIZE = torch.ops.aten.sym_size.int


def operator_names() -> list[str]:
    """The names of all operators that are registered now, as `torch.ops` spells them, without overloads."""
    names = (name.partition(".")[0].replace("::", ".") for name in torch._C._dispatch_get_all_op_names())
    return sorted(set(names))
