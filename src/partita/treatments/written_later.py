"""What is written later: values of a region that others may write to when it has run, before its backward wants them.

A compiler may keep an output or an input for the backward pass where plain torch keeps something else.
"""

from __future__ import annotations

from torch.fx import GraphModule

from partita.graphs.later_writes import later_writers, names_written_outside
from partita.regions import Region

__all__ = ["names_written_later"]


def names_written_later(body: GraphModule, region: Region) -> frozenset[str]:
    """The names of the nodes of a region's body, its inputs among them, that others may write to after it has run."""
    computed, sources = names_written_outside(region.nodes), region.inputs()
    written = later_writers(sources, region.nodes)
    if not written:
        return computed
    inputs = {node.name for node in body.graph.find_nodes(op="placeholder")}
    # Inputs that are called otherwise than what they stand for, such as items of containers, may be any of these.
    unnamed = inputs.difference(node.name for node in sources)
    return computed | inputs.intersection(node.name for node in written) | unnamed
