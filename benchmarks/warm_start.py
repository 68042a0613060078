"""Warm start of a served Llama of 8 layers in a new process: CPU seconds beyond imports, beside the cold start.

    python -m benchmarks.warm_start

The first process captures the model, cuts it around attention and compiles it with Inductor; the second one loads what
`torch.save` has stored and calls it. Both have the same folder for the kernels of Inductor, empty at first.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.report import line
from benchmarks.rows import Row, at_most
from benchmarks.scales import SCALES, Scale

LAYERS = 8


def _cold(path: str) -> dict[str, float]:
    """Captures, compiles, calls and saves; the seconds until the first result."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import partita
    from partita.policies import AroundOperators
    from partita.treatments import Call, Lower

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
            self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=LAYERS, use_cache=False))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=ids).logits
            return logits

    _import_the_compiler()
    torch.manual_seed(0)
    model, ids = Logits().eval(), torch.randint(0, 256, (2, 16))
    begin = _cpu_seconds()
    rows, tokens = torch.export.Dim("rows", min=2, max=64), torch.export.Dim("tokens", min=2, max=512)
    program = partita.capture(model, (ids,), dynamic_shapes=({0: rows, 1: tokens},))
    around = AroundOperators(torch.ops.aten.scaled_dot_product_attention.default)
    lower = Lower("inductor", strict=True)
    plan = partita.plan(program, around, lambda region: Call() if region.label == "chosen" else lower)
    module = plan.apply().module()
    with torch.no_grad():
        found = module(ids)
    seconds = _cpu_seconds() - begin
    torch.save(module, path)
    torch.save((ids, found), f"{path}.expected")
    return {"seconds": seconds, "compiled": sum(one.is_new for one in plan.compilations)}


def _warm(path: str) -> dict[str, float]:
    """Loads and calls; the seconds until the first result."""
    import partita  # noqa: F401

    _import_the_compiler()
    ids, expected = torch.load(f"{path}.expected")
    begin = _cpu_seconds()
    module = torch.load(path, weights_only=False)
    with torch.no_grad():
        found = module(ids)
    seconds = _cpu_seconds() - begin
    assert torch.equal(found, expected)
    return {"seconds": seconds}


def _import_the_compiler() -> None:
    """Imports are not measured: those of Inductor take seconds, in whatever process they happen."""
    import torch._inductor.compile_fx  # noqa: F401
    import torch._inductor.standalone_compile  # noqa: F401

    from partita.lowering import lowered  # noqa: F401


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _in_a_process(what: str, folder: str) -> dict[str, float]:
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/kernels",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.warm_start", what, f"{folder}/served.pt"],
        env={**os.environ, **caches, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=Path(__file__).resolve().parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(scale: Scale) -> Iterator[Row]:
    """The warm start, the best of three, beside the cold one."""
    with tempfile.TemporaryDirectory() as folder:
        cold = _in_a_process("cold", folder)
        warm = min(_in_a_process("warm", folder)["seconds"] for _ in range(3))
    yield Row(
        section="warm start",
        case=f"Llama of {LAYERS} layers, {cold['compiled']:.0f} bodies, torch.load and a call",
        unit="s",
        ours=warm,
        beside="cold",
        other=cold["seconds"],
        reading="seconds",
        value=warm,
        target=at_most(1.0),
    )


def main(arguments: list[str]) -> None:
    """Prints the row; with two arguments, measures one start."""
    torch.set_num_threads(1)
    if arguments:
        print(json.dumps({"cold": _cold, "warm": _warm}[arguments[0]](arguments[1])))
        return
    for row in rows(SCALES["default"]):
        print(line(row))


if __name__ == "__main__":
    main(sys.argv[1:])
