"""Regions of a joint graph as its forward alone shows them, where what only the backward reads is no result."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from partita.graphs.joint_forward import forward_part
from partita.regions.partition import Partition
from partita.regions.region import Region

__all__ = ["forward_alone"]


def forward_alone(partition: Partition) -> tuple[Partition, Mapping[Node, Node]] | None:
    """The same regions in a program of the forward, and the node that each of its nodes stands for.

    None where the program is no joint graph, or where a region holds nodes of the backward.
    """
    if partition.program.joint is None:
        return None
    part = forward_part(partition.program)
    if not all(node in part.copies for region in partition for node in region.nodes):
        return None
    regions = [
        Region(region.name, tuple(part.copies[node] for node in region.nodes), region.label) for region in partition
    ]
    return Partition(part.program, regions), part.original
