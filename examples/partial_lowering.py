"""Compiles what lies between the calls of attention, once for all layers and batch sizes, and serves with it.

python examples/partial_lowering.py            # regions go to AOTAutograd, without code generation
python examples/partial_lowering.py inductor   # regions go to Inductor
"""

from __future__ import annotations

import logging
import sys

import torch
from model import Decoder, some_ids
from torch.fx import Node

import partita
from partita.backends import find_backend
from partita.policies import ByCapability
from partita.treatments import Lower


def main(name: str) -> None:
    torch.manual_seed(0)
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("partita").setLevel(logging.INFO)  # says what is compiled, and what cannot be
    model, ids = Decoder(layers=4).eval(), some_ids()
    rows = torch.export.Dim("rows", min=2, max=64)
    program = partita.capture(model, (ids,), dynamic_shapes=({0: rows},))

    backend = find_backend(name)

    def engine(node: Node) -> str | None:
        """The engine runs attention itself; about everything else it asks the compiler."""
        return "it has a kernel of its own" if "attention" in node.name else backend.refusal(node)

    plan = partita.plan(program, ByCapability(engine), Lower(backend))
    print(plan)
    print(plan.summary())
    print(plan.explain("scaled_dot_product_attention"))
    served = plan.apply()

    # Warm up before the first request: the batch size is symbolic, and the middle layers are equal, so that three
    # functions are compiled for five regions and all sizes.
    with torch.inference_mode():
        served.module()(ids)
    for failure in plan.failures:
        print(f"runs eagerly: {failure}")

    with torch.inference_mode():
        print(partita.verify(program, served, (ids,), gradients=False))
        for count in (3, 17, 64):
            batch = some_ids(count)
            torch.testing.assert_close(served.module()(batch), model(batch))
    print("batches of other sizes give what the model gives")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "aot_eager")
