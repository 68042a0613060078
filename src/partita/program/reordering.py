"""What reordering a program must respect, and by how much it may change sums of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch.fx import Node

from partita.analysis.effects.calls import tensors_of
from partita.analysis.nodes import value_of
from partita.analysis.tolerance import Tolerance
from partita.program.program import Program

#: The effect successors of each node.
EffectSuccessors: TypeAlias = Mapping[Node, Sequence[Node]]


def effect_successors(program: Program) -> EffectSuccessors:
    """The nodes that must stay after each node although no data flows between them."""
    nodes = program.index.nodes
    successors: dict[Node, list[Node]] = {}
    for before, after in program.effects.edges():
        successors.setdefault(nodes[before], []).append(nodes[after])
    return successors


def summation_tolerance(program: Program) -> Tolerance:
    """How far sums of gradients may change when operators are reordered, or a weight is cast once more.

    It is the rounding error of the coarsest dtype that the program is known to add.
    """
    dtypes = {*_cast_dtypes(program), *_known_dtypes(program)}
    # A block may name a dtype that autocast does not support; torch reports that when it runs.
    eps = (torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    return Tolerance(rounding=max(eps, default=torch.finfo(torch.float64).eps))


def uses_autocast(program: Program) -> bool:
    """Whether any node runs under autocast, which caches the cast of a weight for a block: a cut casts it again."""
    return any(True for _ in _cast_dtypes(program))


def _cast_dtypes(program: Program) -> Iterator[torch.dtype]:
    for mode in set(program.modes.by_number or ()):
        for autocast in mode.autocast:
            if autocast.enabled:
                yield torch.bfloat16 if autocast.dtype is None else autocast.dtype


def _known_dtypes(program: Program) -> Iterator[torch.dtype]:
    values = [value_of(node) for node in program.index.nodes]
    for tensor in (*values, *tensors_of(program.graph_module)):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            yield tensor.dtype
