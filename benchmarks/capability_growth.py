"""How long it takes to find regions in a large graph, by capability or repeats: measured in a process of its own."""

from __future__ import annotations

import gc
import random
import resource

from torch.fx import Node

from benchmarks.graphs import build
from benchmarks.timing import CPU, clocked, median
from partita import Program, plan
from partita.policies import ByCapability, Repeats
from partita.treatments import Call

__all__ = ["growing_capability", "growing_repeats"]


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


def growing_repeats(kind: str, nodes: int, repeats: int) -> dict[str, float]:
    """The CPU seconds of a plan that finds what repeats, analyses included, and the peak in bytes."""
    module = build(kind, nodes)
    taken = []
    for _ in range(repeats):
        gc.collect()
        taken.append(clocked(lambda: plan(Program.of(module), Repeats(), Call()), CPU)[0])
    return {"cpu": median(taken), "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
