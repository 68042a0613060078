"""What the command line takes before it answers: help, and the facts about a saved program, in new processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import partita
from benchmarks.rows import Row, at_most
from benchmarks.scales import Scale
from benchmarks.timing import median

__all__ = ["rows"]

_HELP = """
import time
from partita_cli import main
main(["--help"])
print(0.0, time.process_time())
"""
#: The last line tells how long torch took, and how long the command then; fake tensors import torch._dynamo (2.13).
_INSPECT = """
import sys, time
begin = time.process_time()
import torch
end = time.process_time()
from partita_cli import main
main(["inspect", sys.argv[1], "--json"])
print(end - begin, time.process_time() - end)
"""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def rows(scale: Scale) -> Iterator[Row]:
    """CPU seconds, the medians of five processes; one at the smallest scale, on a smaller file."""
    is_tiny = scale.analysed_nodes <= 200
    turns, blocks = (1, 4) if is_tiny else (5, 182)
    with TemporaryDirectory() as folder:
        file = Path(folder, "model.pt2")
        program = partita.capture(nn.Sequential(*(_Block() for _ in range(blocks))), (torch.randn(4, 16),))
        program.save(file)
        cached = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        cached["PYTHONPYCACHEPREFIX"] = folder
        taken = {code: _measured(code, file, cached, turns) for code in (_HELP, _INSPECT)}
    yield Row(
        section="command line",
        case="partita --help",
        unit="s",
        ours=taken[_HELP][1],
        reading="seconds",
        value=taken[_HELP][1],
        target=at_most(0.3),
    )
    of_torch, own = taken[_INSPECT]
    yield Row(
        section="command line",
        case=f"partita inspect, {len(program.index):,} nodes, after torch",
        unit="s",
        ours=own,
        beside="import torch",
        other=of_torch,
        reading="seconds",
        value=own,
        target=at_most(1.0),
    )


def _measured(code: str, file: Path, environment: Mapping[str, str], turns: int) -> tuple[float, float]:
    """The medians of the two numbers in the last line that a process prints; the first one makes the bytecode."""
    command, taken = [sys.executable, "-c", code, str(file)], []
    for _ in range(turns + 1):
        printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        taken.append([float(word) for word in printed.splitlines()[-1].split()])
    first, second = (median(column) for column in zip(*taken[1:], strict=True))
    return first, second
