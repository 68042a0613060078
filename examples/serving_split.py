"""Splits a decoder around its attention, as serving engines do to capture or compile what lies between.

python examples/serving_split.py
"""

from __future__ import annotations

import torch
from model import Decoder, some_ids

import partita
from partita.policies import AroundOperators
from partita.treatments import Call


def main() -> None:
    torch.manual_seed(0)
    model, ids = Decoder(layers=2).eval(), some_ids()
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(model, (ids,), dynamic_shapes=({0: rows},))

    program = partita.Program.of(exported.module())
    attention = torch.nn.functional.scaled_dot_product_attention
    plan = partita.plan(program, AroundOperators(attention), Call())
    print(plan)
    print(plan.explain("scaled_dot_product_attention"))

    after = plan.apply()
    # The batch size is symbolic, so another one is tried as well.
    print(partita.verify(program, after, (ids,)))

    between = [region for region in plan.partition if region.label == "between"]
    print(f"{len(between)} pieces between {len(plan.partition) - len(between)} calls of attention")
    with torch.no_grad():
        batch = some_ids(5)
        assert torch.equal(after.module()(batch), exported.module()(batch))
    print("a batch of another size gives what the exported model gives")


if __name__ == "__main__":
    main()
