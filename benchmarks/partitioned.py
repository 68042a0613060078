"""Graphs that are partitioned by what is supported, by us and by torch: measured in a process of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes import splitter_base
from torch.fx.passes.infra import partitioner as torch_partitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from benchmarks.graphs import build
from benchmarks.timing import CPU, clocked, median, within
from partita.compat import partitioner as our_partitioner

__all__ = ["SomeNodes", "partitioned", "refused_names"]


class SomeNodes(OperatorSupportBase):
    """Supports every call but those of some names."""

    def __init__(self, refused: frozenset[str]) -> None:
        self.refused = refused

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool:
        return node.op == "call_function" and node.name not in self.refused


def refused_names(module: GraphModule, share: float, seed: int = 0) -> frozenset[str]:
    """The names of a share of the nodes, chosen at random."""
    chooser = random.Random(seed)
    return frozenset(node.name for node in module.graph.nodes if chooser.random() < share)


def partitioned(
    way: str, kind: str, nodes: int, share: float, *, repeats: int = 1, limit_s: float | None = None
) -> dict[str, Any]:
    """The median CPU seconds of a way to partition, whether it came to its end, and how many parts it found.

    While a limit is set, the kernel counts CPU time in ticks of some milliseconds, so only slow ways get one.
    """
    taken, finished, found = [], True, [0]
    for _ in range(repeats):
        module = build(kind, nodes)
        action = partial(_count, found, way, module, SomeNodes(refused_names(module, share)))
        if limit_s is None:
            taken += clocked(action, CPU)
        else:
            spent, finished = within(limit_s, action)
            taken.append(spent)
    return {"cpu": median(taken), "finished": finished, "parts": found[-1]}


def _count(found: list[int], way: str, module: GraphModule, support: OperatorSupportBase) -> None:
    found.append(_WAYS[way](module, support))


def _proposed(library: Any) -> Callable[[GraphModule, OperatorSupportBase], int]:
    def propose(module: GraphModule, support: OperatorSupportBase) -> int:
        chooser = library.CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)
        return len(chooser.propose_partitions())

    return propose


def _fused(library: Any) -> Callable[[GraphModule, OperatorSupportBase], int]:
    """Partitions, fuses and calls the result once, so that code that waits for a call counts as well."""

    def fuse(module: GraphModule, support: OperatorSupportBase) -> int:
        chooser = library.CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)
        fused = chooser.partition_and_fuse()
        fused(_INPUT)
        return len(fused.graph.find_nodes(op="call_module"))

    return fuse


def _split(module: GraphModule, support: OperatorSupportBase) -> int:
    splitter = splitter_base._SplitterBase(module, (_INPUT,), support, splitter_base._SplitterSettingBase())
    split = splitter()
    split(_INPUT)
    return sum(str(node.target).startswith("_run_on_acc") for node in split.graph.find_nodes(op="call_module"))


_INPUT = torch.ones(2, 2)
_WAYS: dict[str, Callable[[GraphModule, OperatorSupportBase], int]] = {
    "ours, proposed": _proposed(our_partitioner),
    "torch, proposed": _proposed(torch_partitioner),
    "ours, fused": _fused(our_partitioner),
    "torch, fused": _fused(torch_partitioner),
    "splitter_base": _split,
}
