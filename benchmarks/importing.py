"""What `import partita` adds to `import torch`, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from tempfile import TemporaryDirectory

from benchmarks.rows import Row, at_most
from benchmarks.scales import Scale
from benchmarks.timing import median

__all__ = ["rows"]

_MEASURE = """
import time
begin = time.process_time()
import torch
middle = time.process_time()
import partita
print(middle - begin, time.process_time() - middle)
"""


def rows(scale: Scale) -> Iterator[Row]:
    """CPU seconds, the medians of five processes; one at the smallest scale."""
    turns = 1 if scale.turns_of_calls < 100 else 5
    with TemporaryDirectory() as folder:
        # An installed package has bytecode; a checkout has it from the second import on, unless a variable forbids it.
        cached = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        cached["PYTHONPYCACHEPREFIX"] = folder
        _measured(cached)
        taken = [_measured(cached) for _ in range(turns)]
    ours, torchs = median(own for _, own in taken), median(other for other, _ in taken)
    yield Row(
        section="import",
        case="import partita, after torch",
        unit="s",
        ours=ours,
        beside="import torch",
        other=torchs,
        reading="seconds",
        value=ours,
        target=at_most(0.15),
    )


def _measured(environment: Mapping[str, str]) -> tuple[float, float]:
    printed = subprocess.run(
        [sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True, env=environment
    ).stdout
    of_torch, own = map(float, printed.split())
    return of_torch, own
