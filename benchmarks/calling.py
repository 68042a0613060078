"""What a call of a model in 100 parts costs once everything is warm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import GraphModule

from benchmarks.graphs import build
from benchmarks.models import exported_llama, flat_inputs, functional
from benchmarks.rows import Row, at_most
from benchmarks.scales import Scale
from benchmarks.splitting import splits
from benchmarks.timing import interleaved, median, quotient

__all__ = ["rows"]

_PARTS = 100

#: Calls until the code is generated and Python's interpreter has specialised it.
_WARM_UP = 20

#: "No more than torch's": what two equal modules differ by here from run to run.
_NOISE = 0.03


def rows(scale: Scale) -> Iterator[Row]:
    """A graph of small operators, where the calls of the parts weigh most, and the exported model."""
    yield _row(f"residual 1,000, {_PARTS} parts", build("residual", 1_000), (torch.ones(2, 2),), scale)
    if not scale.layers:
        return
    program = exported_llama(scale.layers)
    yield _row(f"Llama {scale.layers} layers, {_PARTS} parts", functional(program), flat_inputs(program), scale)


def _row(case: str, module: GraphModule, given: tuple[torch.Tensor, ...], scale: Scale) -> Row:
    split = {name: way() for name, way in splits(module, _PARTS, simple=False).items()}
    calls = 10
    with torch.no_grad():
        for cut in split.values():
            _calls(cut, given, _WARM_UP)()
        taken = interleaved({name: _calls(cut, given, calls) for name, cut in split.items()}, scale.turns_of_calls)
    return Row(
        section="call",
        case=case,
        unit="us",
        ours=median(taken["ours"]) / calls * 1e6,
        beside="split_module",
        other=median(taken["split_module"]) / calls * 1e6,
        reading="of its cost",
        value=quotient(taken["ours"], taken["split_module"]),
        target=at_most(1 + _NOISE) if scale.turns_of_calls >= 30 else None,
    )


def _calls(module: GraphModule, given: tuple[torch.Tensor, ...], times: int) -> Callable[[], object]:
    def call() -> None:
        for _ in range(times):
            module(*given)

    return call
