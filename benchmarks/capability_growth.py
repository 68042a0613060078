"""How long it takes to find regions in a large graph, by capability or repeats: measured in a process of its own."""

from __future__ import annotations

import gc
import random
import resource

from torch.fx import Node

from benchmarks.graphs import build
from benchmarks.models import exported_large_llama
from benchmarks.timing import CPU, clocked, median
from partita import Program, plan
from partita.policies import ByCapability, Repeats
from partita.treatments import Call

__all__ = ["growing_capability", "growing_repeats", "repeats_of_llama"]


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


def repeats_of_llama(layers: int) -> dict[str, float]:
    """The CPU seconds of a plan that finds the layers of a Llama of Llama-3-70B's sizes, and of applying it.

    Its tensors have no memory. The layers are counted: the largest number of calls of one body.
    """
    exported = exported_large_llama(layers)
    taken = clocked(lambda: plan(Program.of(exported), Repeats(), Call()), CPU)[0]
    found = plan(Program.of(exported), Repeats(), Call())
    calls = max(body.calls for body in found.bodies())
    return {"cpu": taken, "applied": clocked(found.apply, CPU)[0], "calls": calls}
