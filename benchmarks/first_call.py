"""How soon a split model has answered once: the split, the generation of code, and one call on tiny tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import GraphModule

from benchmarks.graphs import build
from benchmarks.models import exported_llama, flat_inputs, functional, has_targets
from benchmarks.rows import Row, Target, at_least
from benchmarks.scales import Scale
from benchmarks.splitting import PARTS, splits
from benchmarks.timing import interleaved, median, quotient

__all__ = ["rows"]


def rows(scale: Scale) -> Iterator[Row]:
    """Three graphs of middle size, and the exported model."""
    nodes = min(16_000, max(scale.beside_torch))
    target = at_least(2) if nodes == 16_000 else None
    for kind in ("residual", "random", "writes"):
        yield _row(f"{kind} {nodes:,}, {PARTS} parts", build(kind, nodes), (torch.ones(2, 2),), target)
    if not scale.layers:
        return
    program = exported_llama(scale.layers)
    target = at_least(2) if has_targets(scale.layers) else None
    yield _row(f"Llama {scale.layers} layers, {PARTS} parts", functional(program), flat_inputs(program), target)


def _row(case: str, module: GraphModule, given: tuple[torch.Tensor, ...], target: Target | None) -> Row:
    ways = splits(module, PARTS, simple=False)
    with torch.no_grad():
        taken = interleaved({name: _called(split, given) for name, split in ways.items()}, 3)
    return Row(
        section="split and first call",
        case=case,
        unit="ms",
        ours=median(taken["ours"]) * 1e3,
        beside="split_module",
        other=median(taken["split_module"]) * 1e3,
        reading="times sooner",
        value=quotient(taken["split_module"], taken["ours"]),
        target=target,
    )


def _called(split: Callable[[], GraphModule], given: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    return lambda: split()(*given)
