"""What is written later: values of a region that others may write to when it has run, before its backward wants them.

A compiler may keep an output or an input for the backward pass where plain torch keeps something else.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from partita.graphs.later_writes import later_writer, names_written_outside, writers_of
from partita.regions import Region

__all__ = ["names_written_later"]


def names_written_later(body: GraphModule, region: Region) -> frozenset[str]:
    """The names of the nodes of a region's body, its inputs among them, that others may write to after it has run."""
    computed = names_written_outside(region.nodes)
    sources = _sources_written_later(region)
    if not sources:
        return computed
    inputs = {node.name for node in body.graph.find_nodes(op="placeholder")}
    # Inputs that are called otherwise than what they stand for, such as items of containers, may be any of these.
    unnamed = inputs.difference(node.name for node in region.inputs())
    return computed | inputs.intersection(node.name for node in sources) | unnamed


def _sources_written_later(region: Region) -> list[Node]:
    inside = {node.name for node in region.nodes}
    written = (node for node in region.inputs() if not writers_of(node) <= inside)
    return [node for node in written if later_writer(node, region.nodes) is not None]
