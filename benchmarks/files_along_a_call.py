"""How many files of the source one call runs through, and how often it changes from one package to another.

    python -m benchmarks.files_along_a_call

A sign of how easily a path can be followed, not a goal. Counted are files whose functions run, the top-level packages
that they are in, and changes from one package to another: `turns` in the order in which files first run, as a reader
opens them, and `changes` from each call of a function to the next, loops included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import partita
from partita import Program
from partita.policies import ByModule
from partita.treatments import Call, Lower, Recompute

SOURCE = str(Path(partita.__file__).parent)


class Blocks(nn.Module):
    """Three blocks with dropout between, and a block under no_grad."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x / x.norm()
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.1)
        return x


def main() -> None:
    """Prints one line for each path."""
    policy = ByModule("blocks.*")
    # Each path has a program of its own, since a program caches its analyses, and a width of its own, since bodies that
    # are equal share compiled functions.
    (to_cut, _), (to_call, x_called), (to_mark, _), (to_train, x_trained), (to_lower, _), (to_run, x_run) = (
        _captured(width) for width in range(8, 14)
    )
    model, x = Blocks(14), torch.randn(2, 14)
    program = partita.capture(model, (x,))
    recomputed = partita.plan(program, policy, Recompute()).apply().module()
    lowered = partita.plan(program, policy, Lower("aot_eager")).apply().module()
    paths: dict[str, Callable[[], object]] = {
        "split: plan and apply": lambda: partita.plan(to_cut, policy, Call()).apply(),
        "split: to the result of a call": lambda: partita.plan(to_call, policy, Call()).apply().module()(x_called),
        "capture": lambda: partita.capture(model, (x,)),
        "recompute: plan and apply": lambda: partita.plan(to_mark, policy, Recompute()).apply(),
        "recompute: forward and backward": lambda: recomputed(x).sum().backward(),
        "recompute: to the gradients": lambda: (
            partita.plan(to_train, policy, Recompute()).apply().module()(x_trained).sum().backward()
        ),
        "lower: plan and apply": lambda: partita.plan(to_lower, policy, Lower("aot_eager")).apply(),
        "lower: first call": lambda: lowered(x),
        "lower: second call": lambda: lowered(x),
        "lower: to the result of a first call": lambda: (
            partita.plan(to_run, policy, Lower("aot_eager")).apply().module()(x_run)
        ),
    }
    print(f"{'path':36} {'files':>6} {'packages':>9} {'turns':>6} {'changes':>8}")
    for name, path in paths.items():
        files, changes = _followed(path)
        packages = [_package(file) for file in files]
        turns = sum(one != next_one for one, next_one in pairwise(packages))
        print(f"{name:36} {len(files):6} {len(set(packages)):9} {turns:6} {changes:8}")


def _captured(width: int) -> tuple[Program, Tensor]:
    x = torch.randn(2, width)
    return partita.capture(Blocks(width), (x,)), x


def _followed(path: Callable[[], object]) -> tuple[list[str], int]:
    """The files that run, in the order in which they first do, and how often the package changes between calls."""
    files: dict[str, None] = {}
    changes, last = 0, ""

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal changes, last
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(SOURCE):
            return
        files[file] = None
        package = _package(file)
        changes, last = changes + (package != last), package

    sys.setprofile(note)
    try:
        path()
    finally:
        sys.setprofile(None)
    return list(files), changes


def _package(file: str) -> str:
    return Path(file).relative_to(SOURCE).parts[0]


if __name__ == "__main__":
    main()
