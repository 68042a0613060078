"""Operators that Partita itself writes into graphs."""

from __future__ import annotations

import torch

__all__ = ["SYM_SIZE"]

SYM_SIZE = torch.ops.aten.sym_size.int
