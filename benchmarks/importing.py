"""What `import partita` adds to `import torch`, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

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
    taken = [_measured() for _ in range(turns)]
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


def _measured() -> tuple[float, float]:
    printed = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True).stdout
    of_torch, own = map(float, printed.split())
    return of_torch, own
