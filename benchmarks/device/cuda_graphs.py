"""CUDA graphs of pieces on a GPU: replays beside eager mode, and the host time of a step beside torch's own ways.

    python -m benchmarks.device.cuda_graphs                  # all sections, each whatever became of the others
    python -m benchmarks.device.cuda_graphs captured times

A decoder of 8 blocks (width 1024, bfloat16) is cut around its attention; results go to `$OUT`, or to
`benchmarks/results`, as lines of JSON.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import partita
from partita.lowering.lowered import Lowered
from partita.policies import AroundOperators, BySize
from partita.torch_compile import backend
from partita.treatments import Call, LeaveEager, Lower

LAYERS, WIDTH, HEADS, WORDS, TOKENS = 8, 1024, 16, 32000, 16
SIZES = (2, 4, 8)
STEPS = 40


class Block(nn.Module):
    """Attention and a gated feed-forward part, each after a norm; the buffer is state that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.epsilon = 1e-6  # Dynamo makes a tensor on the CPU of it.

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x) * (self.scale + self.epsilon))
            .view(batch, tokens, 3, HEADS, width // HEADS)
            .unbind(2)
        )
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
        y = self.norm2(x)
        fed: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return fed


class Decoder(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().to("cuda", torch.bfloat16).eval()


def ids_of(batch: int) -> Tensor:
    return torch.randint(WORDS, (batch, TOKENS), device="cuda")


def captured(model: nn.Module, **options: Any) -> nn.Module:
    """The model cut around attention, captured for any batch."""
    rows = torch.export.Dim("rows", min=2, max=64)
    program = partita.capture(model, (ids_of(3),), dynamic_shapes=({0: rows},))
    lower = Lower("inductor", strict=True, **options)
    around = AroundOperators(torch.ops.aten.scaled_dot_product_attention.default)
    plan = partita.plan(program, around, lambda region: Call() if region.label == "chosen" else lower)
    return plan.apply().module()


def in_torch_compile(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    """The model cut around attention inside torch.compile."""
    lower = Lower("inductor", strict=True, **options)
    return torch.compile(
        model,
        backend=backend,
        dynamic=True,
        options={
            "policy": AroundOperators(functional.scaled_dot_product_attention),
            "treatment": lambda region: LeaveEager() if region.label == "chosen" else lower,
        },
    )


def recordings(module: nn.Module) -> int:
    regions = (each for each in module.modules() if isinstance(each, Lowered))
    return sum(len(region._dispatcher._cuda_graphs or ()) for region in regions)


def check_replays(model: Decoder, call: Callable[..., Tensor]) -> dict[str, Any]:
    """Replays beside eager mode: changed inputs, weights changed in place, a weight at another address."""
    kept, worst = [], 0.0

    def step(batch: int) -> None:
        ids = ids_of(batch)
        kept.append((call(ids), model(ids)))

    for batch in (*SIZES, 6, *SIZES, 6, *SIZES):
        step(batch)
    for block in model.blocks:
        block.scale.mul_(1.5)
        block.down.weight.mul_(0.5)
    for batch in SIZES:
        step(batch)
    model.blocks[0].up.weight.data = torch.randn_like(model.blocks[0].up.weight) * 0.02
    for batch in (*SIZES, *SIZES):
        step(batch)
    for found, expected in kept:  # Compared at the end: none may have been overwritten by a later replay.
        worst = max(worst, ((found - expected).float().abs().max() / expected.float().abs().max()).item())
    return {"steps": len(kept), "worst_relative": round(worst, 5), "ok": worst < 0.03}


def section_captured() -> Iterator[dict[str, Any]]:
    model = decoder()
    module = captured(model, cuda_graphs=SIZES, static_inputs=("ids",))
    found = check_replays(model, module)
    # After a weight has moved, each of the three sizes is recorded again in the region that reads it.
    yield {**found, "recordings": recordings(module), "regions": LAYERS + 1}
    plain = captured(model)
    kept = captured(model, cuda_graphs=True)
    for batch in (*SIZES, *SIZES):
        ids = ids_of(batch)
        expected = plain(ids)
        assert torch.equal(kept(ids), expected), "a replay differs from a call of the same function"
    yield {"same_bits_as_without_graphs": True, "ok": recordings(kept) == len(SIZES) * (LAYERS + 1)}


def section_torch_compile() -> Iterator[dict[str, Any]]:
    torch.compiler.reset()
    model = decoder()
    sizes = (*SIZES, TOKENS)  # The number of tokens is dynamic as well there.
    yield check_replays(model, in_torch_compile(model, cuda_graphs=sizes))


class Cache(nn.Module):
    """State that a piece mutates, as a cache of keys does, and an output that is a view of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(64, WIDTH))

    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.index_copy_(0, at, x)
        return torch.tanh(self.seen.sum(0)) * x, x.t()


def section_mutation() -> Iterator[dict[str, Any]]:
    model, other = Cache().cuda(), Cache().cuda()
    args = torch.randn(4, WIDTH, device="cuda"), torch.arange(4, device="cuda")
    lower = Lower("inductor", strict=True, cuda_graphs=True)
    module: Any = partita.plan(partita.capture(other, args), BySize(parts=1), lower).apply().module()
    for step in range(5):
        x, at = torch.randn(4, WIDTH, device="cuda"), torch.arange(4, device="cuda") + 4 * step
        torch.testing.assert_close(module(x, at), model(x, at))
        torch.testing.assert_close(module.seen, model.seen)
    yield {"recordings": recordings(module), "ok": recordings(module) == 1}


def section_streams() -> Iterator[dict[str, Any]]:
    """Two threads on streams of their own share the module and its fixed memory."""
    model = decoder()
    module = captured(model, cuda_graphs=True)
    for batch in SIZES:
        module(ids_of(batch))
    wrong: list[str] = []

    def serve(seed: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for step in range(30):
                ids = ids_of(SIZES[(seed + step) % len(SIZES)])
                found, expected = module(ids), model(ids)
                worst = ((found - expected).float().abs().max() / expected.float().abs().max()).item()
                if not worst < 0.03:
                    wrong.append(f"thread {seed}, step {step}: {worst}")

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield {"wrong": wrong[:3], "ok": not wrong}


def section_outer_capture() -> Iterator[dict[str, Any]]:
    """A CUDA graph of the whole program around the pieces: these are recorded as part of it."""
    model = decoder()
    module = captured(model, cuda_graphs=True)
    ids = ids_of(4)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        module(ids), module(ids)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = module(ids)
    ids.copy_(ids_of(4))
    graph.replay()
    expected = model(ids)
    worst = ((found - expected).float().abs().max() / expected.float().abs().max()).item()
    yield {"worst_relative": round(worst, 5), "ok": worst < 0.03}


def section_memory() -> Iterator[dict[str, Any]]:
    """What recordings add: one memory for all pieces and sizes, about that of the largest piece."""
    model = decoder()
    found = {}
    for name, options in (("without", {}), ("with", {"cuda_graphs": True})):
        module = captured(model, **options)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for batch in (32, 16, 8, 4, 2):
            module(ids_of(batch))
        gc.collect()
        torch.cuda.empty_cache()
        found[name] = (torch.cuda.memory_reserved() - before) / 2**20
        del module
    outputs = 5 * WORDS * TOKENS * 62 / 5 * 2 / 2**20
    yield {f"{name}_mib": round(value, 1) for name, value in found.items()} | {
        "logits_of_all_sizes_mib": round(outputs, 1)
    }


def section_times() -> Iterator[dict[str, Any]]:
    model, ids = decoder(), ids_of(4)
    ways: dict[str, Callable[[], Callable[..., Any]]] = {
        "eager": lambda: model,
        "torch.compile": lambda: torch.compile(model),
        "torch.compile, reduce-overhead": lambda: torch.compile(model, mode="reduce-overhead"),
        "captured, Lower": lambda: captured(model),
        "captured, Lower, cuda_graphs": lambda: captured(model, cuda_graphs=True, static_inputs=("ids",)),
        "inside torch.compile, Lower": lambda: in_torch_compile(model),
        "inside torch.compile, Lower, cuda_graphs": lambda: in_torch_compile(model, cuda_graphs=True),
    }
    for name, make in ways.items():
        torch.compiler.reset()
        try:
            begin = time.perf_counter()
            call = make()
            call(ids)
            torch.cuda.synchronize()
            first = time.perf_counter() - begin
            yield {"way": name, "first_s": round(first, 2), **_steady(call, ids)}
        except Exception:
            traceback.print_exc()
            yield {"way": name, "ok": False}


def _steady(call: Callable[..., Any], ids: Tensor) -> dict[str, float]:
    host, whole = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(ids)
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    half = STEPS // 2
    return {
        "host_ms": round(statistics.median(host[half:]) * 1e3, 3),
        "step_ms": round(statistics.median(whole[half:]) * 1e3, 3),
    }


SECTIONS = {
    name.removeprefix("section_"): function for name, function in list(globals().items()) if name.startswith("section_")
}


def main(arguments: list[str]) -> None:
    logging.basicConfig(level=logging.WARNING)
    folder = Path(os.environ.get("OUT") or Path(__file__).resolve().parents[1] / "results")
    device = torch.cuda.get_device_name()
    with (folder / "device_cuda_graphs.jsonl").open("w", encoding="utf-8") as file:
        for name in arguments or SECTIONS:
            begin = time.perf_counter()
            lines: list[dict[str, Any]] = []
            try:
                with torch.no_grad():
                    for line in SECTIONS[name]():
                        lines.append(line)
            except Exception as error:
                traceback.print_exc()
                lines.append({"ok": False, "error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"})
            for line in lines:
                text = json.dumps({"section": name, **line, "device": device, "torch": torch.__version__})
                print(text, flush=True)
                file.write(text + "\n")
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
