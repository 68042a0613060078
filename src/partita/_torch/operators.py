"""Operators: what they are, and those that Partita itself writes into graphs."""

from __future__ import annotations

import torch
from torch._ops import OpOverload, OpOverloadPacket

__all__ = ["OPERATORS", "SYM_SIZE"]

#: The classes of the objects in `torch.ops`; they print as their qualified name.
OPERATORS = (OpOverload, OpOverloadPacket)

SYM_SIZE = torch.ops.aten.sym_size.int
