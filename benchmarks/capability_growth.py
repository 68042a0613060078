"""How long it takes to find the regions by capability in a large graph: measured in a process of its own."""

from __future__ import annotations

import gc
import random
import resource

from torch.fx import Node

from benchmarks.graphs import build
from benchmarks.timing import CPU, clocked, median
from partita import Program
from partita.policies import ByCapability

__all__ = ["growing_capability"]


def growing_capability(kind: str, nodes: int, share: float, repeats: int) -> dict[str, float]:
    """The CPU seconds of finding the regions, analyses and the refusal function included, and the peak in bytes."""
    module = build(kind, nodes)
    chooser = random.Random(0)
    refused = {node for node in module.graph.nodes if chooser.random() < share}

    def refusal(node: Node) -> str | None:
        return "refused" if node in refused else None

    taken = []
    for _ in range(repeats):
        gc.collect()
        taken.append(clocked(lambda: ByCapability(refusal)(Program.of(module)), CPU)[0])
    return {"cpu": median(taken), "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
