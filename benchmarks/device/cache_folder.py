"""A cache folder on a GPU: what `Lower(cache=...)` keeps, read by other processes, by two at once, and when damaged.

    python -m benchmarks.device.cache_folder                  # a GPU, in about two minutes
    python -m benchmarks.device.cache_folder --device cpu     # the same on the CPU

Equal blocks are captured, lowered by Inductor and called, for inference and for a training step, in processes of their
own; each compares with eager mode and says how many functions it compiled, loaded, and what it warned of. Two begin at
once in an empty folder, one follows, every file is damaged in one of four ways, and two follow. Prints a line of JSON
for each process; the exit status is 1 if a result differs, or if one compiles that should not.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import partita
from benchmarks.compile_once import Block
from partita.policies import Repeats
from partita.treatments import Lower

BLOCKS, WIDTH, ROWS, TOKENS = 4, 256, 4, 16


class _Warnings(logging.Handler):
    """Counts what Partita warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def serve(folder: str, device: str) -> dict[str, Any]:
    """One process: calls for inference and training, beside eager mode."""
    warned = _Warnings()
    logging.getLogger("partita").addHandler(warned)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS))).to(device)
    x = torch.randn(ROWS, TOKENS, WIDTH, device=device)
    begin = time.perf_counter()
    plan = partita.plan(partita.capture(model, (x,)), Repeats(), Lower("inductor", cache=folder, strict=True))
    module = plan.apply().module()
    with torch.no_grad():
        inferred = module(x)
        expected = model(x)
    same = torch.allclose(inferred, expected, rtol=1e-3, atol=1e-3)
    for called in (module, model):
        called(x).square().mean().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        if called is module:
            found = grads
    same &= all(
        one is not None and other is not None and torch.allclose(one, other, rtol=1e-2, atol=1e-4)
        for one, other in zip(found, grads, strict=True)
    )
    return {
        "same": same,
        "compiled": sum(one.is_new for one in plan.compilations),
        "loaded": sum(one.loaded for one in plan.compilations),
        "seconds": round(time.perf_counter() - begin, 2),
        "warnings": len(warned.found),
        "of_kinds": sorted({" ".join(text.split()[1:4]) for text in warned.found}),
    }


def damage(folder: Path) -> int:
    """Damages every file: cut, one bit flipped, emptied, or another one put before it; returns how many there were."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for number, path in enumerate(files):
        data = path.read_bytes()
        if number % 4 == 0:
            path.write_bytes(data[: len(data) // 2])
        elif number % 4 == 1:
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if data else b"x")
        elif number % 4 == 2:
            path.write_bytes(b"")
        else:
            path.write_bytes(files[number - 3].read_bytes() + data)
    return len(files)


def main(arguments: Sequence[str]) -> int:
    """Runs all processes; with `--serve`, one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        print(json.dumps(serve(options.serve, options.device)))
        return 0
    held = True
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "compiled"
        for turn, processes in (("empty", 2), ("full", 1), ("damaged", 1), ("mended", 1)):
            files = damage(folder) if turn == "damaged" else 0
            running = [_start(folder, Path(root) / f"{turn}_{number}", options.device) for number in range(processes)]
            for process in running:
                output, _ = process.communicate()
                found = json.loads(output.splitlines()[-1]) if process.returncode == 0 else {"same": False}
                held &= found["same"] and (found["compiled"] == 0) == (turn in ("full", "mended"))
                print(json.dumps({"folder": turn, "status": process.returncode, "damaged": files, **found}), flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(json.dumps({"held": held, "device": device, "torch": torch.__version__}))
    return 0 if held else 1


def _start(folder: Path, caches: Path, device: str) -> subprocess.Popen[str]:
    """A process with empty caches of its own beside the folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.device.cache_folder", "--serve", str(folder), "--device", device],
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        stdout=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
