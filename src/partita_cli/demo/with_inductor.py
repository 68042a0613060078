"""`python -m partita_cli.demo.with_inductor`: compiles the large regions of the chapter on lowering, for inference."""

from __future__ import annotations

import logging
import sys

import torch

import partita
from partita.policies import ByCapability
from partita.treatments import Lower
from partita_cli.demo.lowering import seeded, small_chip


def main() -> int:
    """Compares the lowered model with the original; the status is 1 if they differ."""
    _, model, args = seeded()
    program = partita.capture(model, args)
    plan = partita.plan(program, ByCapability(small_chip, min_flops=300_000), Lower("inductor"))
    print(f"  {len(plan.partition)} regions do at least 300,000 FLOPs; equal ones are compiled once")
    with torch.no_grad():
        comparison = partita.compare(program, plan.apply(), args, gradients=False)
    print(f"  compared under no_grad: {comparison}")
    return 0 if comparison.equal else 1


if __name__ == "__main__":
    logging.basicConfig(format="  %(message)s", stream=sys.stdout)
    logging.getLogger("partita").setLevel(logging.INFO)
    raise SystemExit(main())
