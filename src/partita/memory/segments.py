"""Segments: a program as a chain of pieces, found by what it repeats, and by narrow cuts where nothing repeats."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch.fx import Node

from partita._torch.operators.schemas import viewed_node
from partita.analysis.nodes import bytes_of_value, value_of
from partita.policies.repeats import Repeats
from partita.program.program import Program
from partita.regions import Partition, Region
from partita.solvers.narrow_cuts import narrow_cuts


def segments_of(program: Program) -> Partition:
    """Regions in the order in which they run: the blocks that a model repeats, and pieces of what lies between.

    What does not repeat is cut where few bytes cross, into pieces of at most `_MOST_OPERATORS` operators.
    """
    repeats = Repeats(min_size=_FEWEST_OPERATORS)(program)
    regions: list[Region] = []
    for region in repeats:
        regions += [region] if _is_block(region) else _pieces(program, region)
    return Partition(program, regions).returning_in_graph_order()


#: Pieces have so many operators, unless a block that repeats has more.
_FEWEST_OPERATORS, _MOST_OPERATORS = 4, 16


def _is_block(region: Region) -> bool:
    return str(region.label).startswith("repeat") or len(region) <= _MOST_OPERATORS


def _pieces(program: Program, region: Region) -> list[Region]:
    """A region cut at narrow places; its nodes are in graph order."""
    number = program.index.number
    nodes = sorted(region.nodes, key=number.__getitem__)
    cuts = narrow_cuts(_crossing_bytes(nodes), least=_FEWEST_OPERATORS, most=_MOST_OPERATORS)
    borders = [0, *cuts, len(nodes)]
    return [
        Region(f"{region.name}_{at}", tuple(nodes[start:stop]), f"{region.label}_{at}")
        for at, (start, stop) in enumerate(pairwise(borders))
    ]


def _crossing_bytes(nodes: Sequence[Node]) -> list[int]:
    """For each place between two of these nodes the bytes that are made before it and read after it; views are free."""
    place = {node: at for at, node in enumerate(nodes)}
    last: dict[Node, int] = {}
    for at, node in enumerate(nodes):
        for read in node.all_input_nodes:
            base = _base(read)
            if base in place:
                last[base] = at
    change = [0] * (len(nodes) + 1)
    for base, end in last.items():
        size = bytes_of_value(value_of(base)) or 0
        change[place[base] + 1] += size
        change[end + 1] -= size
    return list(accumulate(change))[1 : len(nodes)]


def _base(node: Node) -> Node:
    viewed = viewed_node(node)
    while viewed is not None:
        node, viewed = viewed, viewed_node(viewed)
    return node
