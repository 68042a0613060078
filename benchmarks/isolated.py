"""Measurements that need a process of their own: large graphs, and peaks of memory.

`python -m benchmarks.isolated NAME ARGUMENTS` prints one line of JSON; `measured` runs that.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.capability_growth import growing_capability, growing_repeats, repeats_of_llama
from benchmarks.fitting import compiled_plan_of_blocks, memory_plan_of_llama
from benchmarks.floor import minimal_copy
from benchmarks.graphs import build
from benchmarks.lowered_models import call_overhead, lowered_model
from benchmarks.partitioned import partitioned
from benchmarks.splitting import PARTS, splits
from benchmarks.timing import CPU, clocked, interleaved, median

__all__ = ["measured"]


def measured(name: str, **arguments: Any) -> Any:
    """What the measurement called `name` gives, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.isolated", name, json.dumps(arguments)]
    # The child finds this package and partita where we found them.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    here = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, env=environment, cwd=here, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def large_split(kind: str, nodes: int, *, slow: bool, repeats: int) -> dict[str, list[float]]:
    """The CPU seconds of each way to split a large graph."""
    return interleaved(splits(build(kind, nodes), PARTS, slow=slow), repeats)


def growing_split(kind: str, nodes: int, way: str, repeats: int) -> dict[str, float]:
    """The user and CPU seconds of a way to copy a graph; page faults of the system count in the second only."""
    module = build(kind, nodes)
    split = splits(module, PARTS)["ours"] if way == "ours" else lambda: minimal_copy(module.graph)
    taken = []
    for _ in range(repeats):
        gc.collect()
        taken.append(clocked(split, _user_seconds, CPU))
    return {"user": median(user for user, _ in taken), "cpu": median(cpu for _, cpu in taken)}


def peak_bytes(kind: str, nodes: int, way: str) -> int:
    """By how much one split raises the peak of resident memory above what the graph itself takes."""
    module = build(kind, nodes)
    actions: dict[str, Any] = {**splits(module, PARTS), "minimal node copy": lambda: minimal_copy(module.graph)}
    _warm(way)
    gc.collect()
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Starts the peak anew.
    result = actions[way]()
    after = _resident_bytes("VmHWM")
    assert result is not None
    return after - before


def _warm(way: str) -> None:
    """Tables that a process fills once are no cost of the split."""
    small = build("writes", 100)
    if way in splits(small, PARTS):
        splits(small, PARTS)[way]()


def _user_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def _resident_bytes(entry: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {entry}: peaks of memory are measured on Linux only")


_MEASUREMENTS: dict[str, Callable[..., Any]] = {
    measure.__name__: measure
    for measure in (
        large_split,
        growing_split,
        peak_bytes,
        growing_capability,
        growing_repeats,
        repeats_of_llama,
        memory_plan_of_llama,
        compiled_plan_of_blocks,
        call_overhead,
        lowered_model,
        partitioned,
    )
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(_MEASUREMENTS[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
    os._exit(0)  # Taking a million nodes apart would take longer than the split.
