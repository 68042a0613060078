"""How many files of the source one call runs through, and how often it changes from one package to another.

    python -m benchmarks.files_along_a_call

A sign of how easily a path can be followed, not a goal. Counted are files whose functions run, and changes of the
top-level package between one call and the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import partita
from partita.policies import ByModule
from partita.treatments import Call, Lower, Recompute

SOURCE = str(Path(partita.__file__).parent)


class Blocks(nn.Module):
    """Three blocks with dropout between, and a block under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x / x.norm()
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.1)
        return x


def main() -> None:
    """Prints one line for each path."""
    model, x = Blocks(), torch.randn(2, 8)
    policy = ByModule("blocks.*")
    # Each path plans a program of its own, since a program caches its analyses.
    program, cut, called, rematerialized, compiled = (partita.capture(model, (x,)) for _ in range(5))
    recomputed = partita.plan(program, policy, Recompute()).apply().module()
    lowered = partita.plan(program, policy, Lower("aot_eager")).apply().module()
    paths: dict[str, Callable[[], object]] = {
        "split: plan and apply": lambda: partita.plan(cut, policy, Call()).apply(),
        "split: plan, apply, module and call": lambda: partita.plan(called, policy, Call()).apply().module()(x),
        "capture": lambda: partita.capture(model, (x,)),
        "recompute: plan and apply": lambda: partita.plan(rematerialized, policy, Recompute()).apply(),
        "recompute: forward and backward": lambda: recomputed(x).sum().backward(),
        "lower: plan and apply": lambda: partita.plan(compiled, policy, Lower("aot_eager")).apply(),
        "lower: first call": lambda: lowered(x),
        "lower: second call": lambda: lowered(x),
    }
    print(f"{'path':36} {'files':>6} {'packages':>9} {'changes':>8}")
    for name, path in paths.items():
        files, changes = _followed(path)
        packages = {_package(file) for file in files}
        print(f"{name:36} {len(files):6} {len(packages):9} {changes:8}")


def _followed(path: Callable[[], object]) -> tuple[set[str], int]:
    """The files that run, and how often the package changes between calls."""
    files: set[str] = set()
    changes, last = 0, ""

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal changes, last
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(SOURCE):
            return
        files.add(file)
        package = _package(file)
        changes, last = changes + (package != last), package

    sys.setprofile(note)
    try:
        path()
    finally:
        sys.setprofile(None)
    return files, changes


def _package(file: str) -> str:
    return Path(file).relative_to(SOURCE).parts[0]


if __name__ == "__main__":
    main()
