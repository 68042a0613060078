"""Serves a Llama or a Mixtral: attention stays as it is, the pieces between are compiled once for all sizes.

    python examples/serve.py                       # a Llama
    python examples/serve.py mixtral folder        # a Mixtral; compiled functions are kept in the folder

The model is cut inside torch.compile, and once more as a captured program, whose compiled pieces a new process loads
from the folder. It needs the transformers library.
"""

from __future__ import annotations

import subprocess
import sys
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import partita
from partita.policies import AroundOperators
from partita.torch_compile import backend, plans
from partita.treatments import Call, LeaveEager, Lower

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
BATCHES = [(2, 16), (3, 8), (5, 21)]
#: On a GPU, calls of these sizes are replayed as CUDA graphs; elsewhere it would be a warning.
RECORDED: dict[str, Any] = {"cuda_graphs": (1, 2, 3, 5, 8, 16, 21)} if torch.cuda.is_available() else {}


class Logits(nn.Module):
    """A small model with random weights, called with its static input alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        is_mixtral = name == "mixtral"
        config = MixtralConfig(**SMALL, num_local_experts=4) if is_mixtral else LlamaConfig(**SMALL)
        self.model = (MixtralForCausalLM if is_mixtral else LlamaForCausalLM)(config).eval()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits


def serve_inside_torch_compile(model: nn.Module) -> None:
    piece = Lower("inductor", **RECORDED)
    served = torch.compile(
        model,
        backend=backend,
        dynamic=True,
        options={
            "policy": AroundOperators(nn.functional.scaled_dot_product_attention),
            "treatment": lambda region: LeaveEager() if region.label == "chosen" else piece,
        },
    )
    check(served, model)
    for frame in plans(model):
        print(frame)
        report(frame.plan)


def serve_captured(model: nn.Module, folder: str) -> None:
    rows, tokens = torch.export.Dim("rows", min=2, max=64), torch.export.Dim("tokens", min=2, max=512)
    program = partita.capture(model, (torch.randint(256, BATCHES[0]),), dynamic_shapes=({0: rows, 1: tokens},))
    attention = torch.ops.aten.scaled_dot_product_attention.default
    piece = Lower("inductor", cache=folder, **RECORDED)
    plan = partita.plan(program, AroundOperators(attention), lambda it: Call() if it.label == "chosen" else piece)
    check(plan.apply().module(), model)
    report(plan)


def check(served: Any, model: nn.Module) -> None:
    with torch.no_grad():
        for sizes in BATCHES:
            ids = torch.randint(256, sizes)
            torch.testing.assert_close(served(ids), model(ids), rtol=1e-3, atol=1e-4)


def report(plan: partita.Plan) -> None:
    print(plan.compilations)
    assert not plan.failures, plan.failures
    regions = sum(region.label == "between" for region in plan.partition)
    compiled = sum(one.is_new for one in plan.compilations)
    print(f"{regions} pieces, {compiled} compiled for {len(BATCHES)} sizes")


def main() -> None:
    name, folder, *rest = [*sys.argv[1:], *("llama", "")[len(sys.argv) - 1 :]]
    model = Logits(name)
    if rest == ["again"]:
        serve_captured(model, folder)
        return
    serve_inside_torch_compile(model)
    with TemporaryDirectory() as temporary:
        folder = folder or temporary
        serve_captured(model, folder)
        print("in a new process:", flush=True)
        subprocess.run([sys.executable, __file__, name, folder, "again"], check=True)


if __name__ == "__main__":
    main()
