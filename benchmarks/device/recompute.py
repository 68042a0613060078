"""Activation memory and step time on a GPU: recomputed blocks beside torch's checkpoints put in by hand.

A decoder of 16 blocks (width 2048, 8 x 2048 tokens, bfloat16) trains under each way, each in a fresh process.

    python -m benchmarks.device.recompute                       # all ways, then the ratios
    python -m benchmarks.device.recompute hand:eager:nothing ours:eager:nothing
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import partita
from partita.policies import ByModule
from partita.treatments import Keep, KeepNothing, KeepOperators, Recompute

LAYERS, WIDTH, HEADS, WORDS, TOKENS, BATCH = 16, 2048, 16, 32000, 2048, 8
KEEPS = ("nothing", "attention", "matmuls")
RUNS = ("eager", "compiled")
#: torch's checkpoints by hand; our treatment applied; the torch.compile backend "partita", which marks nodes.
WAYS = [
    "plain:eager",
    "plain:compiled",
    *(f"{who}:{run}:{keep}" for run in RUNS for keep in KEEPS for who in ("hand", "ours")),
    *(f"marks:compiled:{keep}" for keep in KEEPS),
]
#: What each choice is called: by torch's policies, which see the operators below autograd, and in a captured graph.
_BY_HAND = {"attention": ("attention",), "matmuls": ("attention", "aten.mm")}
_ATTENTION = ("aten.scaled_dot_product_attention", functional.scaled_dot_product_attention)
_OURS: dict[str, Keep] = {
    "nothing": KeepNothing(),
    "attention": KeepOperators(*_ATTENTION),
    "matmuls": KeepOperators(*_ATTENTION, "aten.linear", functional.linear),
}


class Block(nn.Module):
    """Attention and a gated feed-forward part, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        seen = (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, tokens, width)
        )
        x = x + self.out(seen)
        y = self.norm2(x)
        fed: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return fed


class Decoder(nn.Module):
    """Blocks between an embedding and a loss; `by_hand` runs each block, by default plainly."""

    def __init__(self, by_hand: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.by_hand is None else self.by_hand(block, x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _policy(names: tuple[str, ...], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = any(name in str(op) for name in names)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts_for(keep: str) -> Callable[[], Any]:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(partial(_policy, _BY_HAND[keep]))

    return contexts


def _by_hand(keep: str) -> Callable[..., Any]:
    if keep == "nothing":
        return partial(checkpoint, use_reentrant=False)
    return partial(checkpoint, use_reentrant=False, context_fn=_contexts_for(keep))


def _build(way: str, ids: Tensor, targets: Tensor) -> tuple[nn.Module, Callable[..., Tensor], int | None]:
    """The model, what is called for a step, and the bytes that a plan says are held between forward and backward."""
    who, run, *keep = way.split(":")
    model = Decoder(_by_hand(keep[0]) if who == "hand" else None).to(torch.bfloat16)
    step: Callable[..., Any] = model
    predicted = None
    if who == "ours":
        program = partita.capture(model, (ids, targets))
        plan = partita.plan(program, ByModule("blocks.*"), Recompute(_OURS[keep[0]]))
        step, total = plan.apply().module(), plan.saved_memory().total
        predicted = None if total is None else total.treated_bytes
    if who == "marks":
        options = {"policy": ByModule("blocks.*"), "treatment": Recompute(_OURS[keep[0]])}
        return model, torch.compile(model, backend="partita", options=options), None
    return model, torch.compile(step) if run == "compiled" else step, predicted


def measure(way: str) -> dict[str, Any]:
    """One way: bytes held after the forward, the peak of a step, and the median time of a step."""
    import torch._inductor.config as inductor_config

    inductor_config.fx_graph_cache = False
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    ids, targets = torch.randint(WORDS, (BATCH, TOKENS)), torch.randint(WORDS, (BATCH, TOKENS))
    model, step, predicted = _build(way, ids, targets)
    torch.cuda.synchronize()
    resting = torch.cuda.memory_allocated()

    def timed() -> float:
        for parameter in model.parameters():
            parameter.grad = None
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(ids, targets).backward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    first = timed()
    timed(), timed()
    for parameter in model.parameters():
        parameter.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    loss = step(ids, targets)
    held = torch.cuda.memory_allocated() - resting
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - resting
    times = sorted(timed() for _ in range(12))
    grads = sum(
        float(parameter.grad.float().abs().sum()) for parameter in model.parameters() if parameter.grad is not None
    )
    return {
        "way": way,
        "first_s": round(first, 2),
        "step_ms": round(1e3 * times[6], 2),
        "held_gb": round(held / 1e9, 3),
        **({} if predicted is None else {"predicted_gb": round(predicted / 1e9, 3)}),
        "peak_gb": round(peak / 1e9, 3),
        "loss": float(loss.detach()),
        "grads": grads,
    }


def _ratios(found: dict[str, dict[str, Any]]) -> None:
    for way, ours in found.items():
        who, _, rest = way.partition(":")
        theirs = found.get(f"hand:{rest}")
        if who in ("ours", "marks") and theirs is not None:
            told = {key: round(ours[key] / theirs[key], 4) for key in ("held_gb", "peak_gb", "step_ms")}
            same = ours["loss"] == theirs["loss"] and ours["grads"] == theirs["grads"]
            print(json.dumps({"way": way, "of hand": told, "same loss and gradients": same}), flush=True)


def main(ways: list[str]) -> None:
    """Measures each way in a process of its own, and prints a line of JSON for each."""
    found = {}
    for way in ways or WAYS:
        command = [sys.executable, "-m", "benchmarks.device.recompute", "--one", way]
        run = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        line = run.stdout.strip().rpartition("\n")[2]
        print(line or f"{way} FAILED {run.stderr[-1500:]}", flush=True)
        if line:
            found[way] = json.loads(line)
    _ratios(found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2])), flush=True)
    else:
        main(sys.argv[1:])
