"""A model of equal blocks: seconds to the first result, and the steady time of a step, for each way to compile it.

Each way runs in a process of its own, with an empty folder for the caches of Inductor:

    python -m benchmarks.compile_once                                    # 24 blocks of width 64 on the CPU
    python -m benchmarks.compile_once --device cuda --width 4096         # on a GPU, inference and training
    python -m benchmarks.compile_once whole ours --blocks 96 --train
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rows import Row, at_most
from benchmarks.scales import Scale

#: Dynamo alone; one block alone; the whole model; each block by `compile()`; by torch's `nested_compile_region`; ours.
WAYS = ("traced", "one", "whole", "by hand", "nested", "ours")
_TOKENS, _HEAD = 16, 16


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, width // _HEAD, _HEAD).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
        fed: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return fed


class Model(nn.Module):
    """Equal blocks, and nothing else."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def compiled(way: str, model: Model) -> Callable[[Tensor], Tensor]:
    """The model, to be compiled in this way at its first call."""
    if way == "traced":
        return torch.compile(model, backend="eager")
    if way == "by hand":
        for block in model.blocks:
            block.compile()
        return model
    if way == "nested":
        for block in model.blocks:
            block.forward = torch.compiler.nested_compile_region(block.forward)
    if way == "ours":
        from partita.torch_compile import backend

        return torch.compile(model, backend=backend)
    return torch.compile(model)


def measure(way: str, *, blocks: int, width: int, device: str, train: bool) -> dict[str, float]:
    """Seconds to the first result (CPU seconds on a CPU), and milliseconds of a step and of its host part."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = Model(1 if way == "one" else blocks, width).to(device, dtype)
    x = torch.randn(2, _TOKENS, width, device=device, dtype=dtype)
    call = compiled(way, model)

    def step() -> None:
        if not train:
            with torch.no_grad():
                call(x)
            return
        call(x).float().square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    clock = _cpu_seconds if device == "cpu" else time.perf_counter
    step_alone(nn.Linear(8, 8).to(device))
    begin = clock()
    step()
    _wait(device)
    first = clock() - begin
    host, whole = [], []
    for _ in range(60):
        _wait(device)
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        _wait(device)
        whole.append(time.perf_counter() - start)
    # The fastest of the later ones: other processes only add to a time.
    return {"first": first, "step": _low(whole[20:]) * 1e3, "host": _low(host[20:]) * 1e3}


def step_alone(model: nn.Module) -> None:
    """Starts Dynamo, the compiler and the device, which every way needs, before the clock."""
    compile_one: Any = torch.compile(model)
    compile_one(torch.randn(3, 8, device=next(model.parameters()).device)).sum().backward()
    torch.compiler.reset()


def _low(times: list[float]) -> float:
    return statistics.quantiles(times, n=10)[0]


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def in_a_process(way: str, **options: Any) -> dict[str, float]:
    """The measurement in a fresh process, with fresh caches."""
    with tempfile.TemporaryDirectory() as caches:
        settings = {"TORCHINDUCTOR_CACHE_DIR": caches, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        path = os.pathsep.join(filter(None, sys.path))
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.compile_once", "--one-way", way, json.dumps(options)],
            env={**os.environ, **settings, "PYTHONPATH": path},
            cwd=Path(__file__).resolve().parent.parent,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(scale: Scale) -> Iterator[Row]:
    """The first result beside the floor, one block and Dynamo's trace of all; the steady step beside the whole."""
    for train in (False, True):
        options = {"blocks": 24, "width": 64, "device": "cpu", "train": train}
        found = {way: in_a_process(way, **options) for way in ("traced", "one", "whole", "nested", "ours")}
        case = f"24 blocks, {'training' if train else 'inference'}"
        floor = found["one"]["first"] + found["traced"]["first"]
        ours, whole = found["ours"], found["whole"]
        for beside, other in (
            ("one block and Dynamo", floor),
            *((way, found[way]["first"]) for way in ("whole", "nested")),
        ):
            limit = at_most(1.15 if train else 1.1) if other is floor else None
            yield _row("first result", case, "s", ours["first"], beside, other, limit)
        yield _row("step of equal blocks", case, "ms", ours["step"], "whole", whole["step"], at_most(1.05))


def _row(section: str, case: str, unit: str, ours: float, beside: str, other: float, target: Any) -> Row:
    return Row(
        section=section,
        case=case,
        unit=unit,
        ours=ours,
        beside=beside,
        other=other,
        reading="times as long",
        value=ours / other,
        target=target,
    )


def main(arguments: list[str]) -> None:
    """Prints the figures of each way that is asked for, and their ratio to the first one."""
    if arguments[:1] == ["--one-way"]:
        print(json.dumps(measure(arguments[1], **json.loads(arguments[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=[], metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", action="store_true")
    options = vars(parser.parse_args(arguments))
    for way in options.pop("ways") or WAYS:
        found = in_a_process(way, **options)
        print(json.dumps({"way": way, **options, **{key: round(value, 3) for key, value in found.items()}}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
