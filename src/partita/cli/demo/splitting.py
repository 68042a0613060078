"""Chapter: a transformer is captured, cut at its attention, applied and verified."""

from __future__ import annotations

import time

import torch

import partita
from partita.cli.demo.model import WORDS, Decoder
from partita.policies import AroundOperators
from partita.treatments import Call

TITLE = "A transformer, cut around its attention"


def show() -> bool:
    """Shows each step and its result; returns whether the cut program equals the original."""
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (2, 16))
    exported = torch.export.export(Decoder().train(), (ids,))
    program = partita.Program.of(exported.module())
    print(f"captured: {program}")

    start = time.perf_counter()
    plan = partita.plan(program, AroundOperators("aten.scaled_dot_product_attention"), Call())
    after = plan.apply()
    print(f"planned and applied in {1e3 * (time.perf_counter() - start):.1f} ms\n\n{plan}\n")
    chosen = next(node.name for node in program.operators() if "dropout" in node.name)
    print(f"plan.explain({chosen!r})\n{plan.explain(chosen)}\n")

    start = time.perf_counter()
    comparison = partita.compare(program, after, (ids,))
    print(f"compared in {time.perf_counter() - start:.1f} s: {comparison}")
    print("values, gradients, dtypes, strides, the mutated buffer, aliasing, RNG state and modes were compared.")
    return comparison.equal
