"""Segments: a program as a chain of pieces, found by what it repeats, and by narrow cuts where nothing repeats."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from math import isqrt
from typing import Literal, TypeAlias, get_args

from torch.fx import Node

from partita._torch.operator_schemas import viewed_node
from partita.analysis.nodes import bytes_of_value, value_of
from partita.errors import OptionError
from partita.policies.by_label import ByAnnotation
from partita.policies.repeats import Repeats
from partita.program.program import Program
from partita.regions import Partition, Region
from partita.solvers.narrow_cuts import narrow_cuts

#: What is done with the calls of `torch.utils.checkpoint` in a model: they are planned like all else, or recomputed.
Checkpoints: TypeAlias = Literal["replan", "respect"]


def checked_checkpoints(value: object) -> Checkpoints:
    """The value of the option `checkpoints`, or an `OptionError`."""
    for known in get_args(Checkpoints):
        if value == known:
            return known  # type: ignore[no-any-return]
    raise OptionError(
        f"`checkpoints` is 'replan', which plans calls of torch.utils.checkpoint like all else, or 'respect', which "
        f"recomputes them as the model says, not {value!r}"
    )


def segments_of(program: Program, checkpoints: Sequence[Region] = ()) -> Partition:
    """Regions in the order in which they run: the blocks that a model repeats, and pieces of what lies between.

    What does not repeat is cut where few bytes cross, into pieces of at most `_MOST_OPERATORS` operators, and fewer
    where there are few in all, since a step of one piece has nothing to free. Regions of `checkpoints` are segments of
    their own.
    """
    repeats = Repeats(min_size=_FEWEST_OPERATORS)(program)
    taken = {node for region in checkpoints for node in region.nodes}
    regions: list[Region] = list(checkpoints)
    for region in repeats:
        for left in _without(program, region, taken):
            regions += [left] if _is_block(left) else _pieces(program, left)
    return Partition(program, regions).returning_in_graph_order()


def checkpoints_of(program: Program) -> tuple[Region, ...]:
    """The calls of `torch.utils.checkpoint` that a captured program has annotated."""
    return ByAnnotation("checkpoint", allow_empty=True)(program).regions


def _without(program: Program, region: Region, taken: Collection[Node]) -> list[Region]:
    """What is left of a region: its nodes in graph order, cut where others of `taken` lie between."""
    if not taken:
        return [region]
    number = program.index.number
    nodes = sorted((node for node in region.nodes if node not in taken), key=number.__getitem__)
    if len(nodes) == len(region):
        return [region]
    others = sorted(number[node] for node in taken)
    runs: dict[int, list[Node]] = {}
    for node in nodes:
        runs.setdefault(bisect(others, number[node]), []).append(node)
    return [
        Region(f"{region.name}_rest_{at}", tuple(run), f"{region.label}_rest_{at}")
        for at, run in enumerate(runs.values())
    ]


#: Pieces have so many operators, unless a block that repeats has more.
_FEWEST_OPERATORS, _MOST_OPERATORS = 4, 16


def _is_block(region: Region) -> bool:
    is_whole = str(region.label).startswith("repeat") and "_rest_" not in str(region.label)
    return is_whole or len(region) < 2 * _FEWEST_OPERATORS


def _pieces(program: Program, region: Region) -> list[Region]:
    """A region cut at narrow places; its nodes are in graph order."""
    number = program.index.number
    nodes = sorted(region.nodes, key=number.__getitem__)
    most = min(2 * isqrt(len(nodes)), _MOST_OPERATORS)
    cuts = narrow_cuts(_crossing_bytes(nodes), least=_FEWEST_OPERATORS, most=most)
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
