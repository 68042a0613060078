"""Cuts a decoder into stages that hold a limited number of bytes of parameters, and runs each stage by itself.

python examples/pipeline_stages.py
"""

from __future__ import annotations

import torch
from model import Block, Decoder, some_ids

import partita
from partita.policies import BySize
from partita.treatments import Call


def main() -> None:
    torch.manual_seed(0)
    model, ids = Decoder(), some_ids()

    # Blocks are called whole, so that they move into their stage with their parameters. Nobody knows what a class of
    # our own does when it is called, so we say that it has no side effects.
    traced = torch.fx.GraphModule(model, WholeBlocks().trace(model))
    program = partita.Program.of(traced, pure=[Block])
    plan = partita.plan(program, BySize(parameter_bytes=120_000), Call())
    print(plan)

    after = plan.apply()
    print(partita.verify(program, after, (ids,)))

    # What a pipeline runtime does: hand the values from stage to stage.
    stages = [getattr(after.module(), region.name) for region in plan.partition]
    values: tuple[torch.Tensor, ...] = (ids,)
    for number, stage in enumerate(stages):
        held = sum(parameter.numel() * parameter.element_size() for parameter in stage.parameters())
        values = stage(*values)
        print(f"stage {number}: {held:,} bytes of parameters, hands on {[tuple(value.shape) for value in values]}")
    assert torch.equal(values[0], model(ids))
    print("the stages in sequence are the model")


class WholeBlocks(torch.fx.Tracer):
    """Traces the decoder and calls its blocks, rather than looking into them."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name.startswith("blocks.") or super().is_leaf_module(m, module_qualified_name)


if __name__ == "__main__":
    main()
