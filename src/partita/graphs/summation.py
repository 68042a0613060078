"""Summation: how far gradients may move when the operators of a program run in another order."""

from __future__ import annotations

import torch

from partita.graphs.program import Program
from partita.graphs.tolerance import Tolerance

__all__ = ["summation_tolerance"]


def summation_tolerance(program: Program) -> Tolerance:
    """What sums of gradients may change by: the rounding of the coarsest numbers that the program adds."""
    modes = program.modes.by_number or ()
    dtypes = {autocast.dtype for mode in set(modes) for autocast in mode.autocast if autocast.enabled}
    coarse = [torch.bfloat16 if dtype is None else dtype for dtype in dtypes]
    return Tolerance(rounding=max((torch.finfo(dtype).eps for dtype in coarse), default=torch.finfo(torch.float64).eps))
