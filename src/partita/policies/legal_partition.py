"""A partition from groups that may need each other: legal groups stay as they are, the others are repaired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch.fx import Node

from partita.errors import CycleError
from partita.graphs.program import Program
from partita.policies.legal_pieces import Cut, cut_into_legal_pieces, cut_into_runs
from partita.policies.places import Piece, partition_of
from partita.regions import Partition
from partita.solvers.quotient import ALONE

__all__ = ["legal_partition"]


def legal_partition(
    program: Program,
    places: Sequence[int],
    pieces: Sequence[Piece],
    reasons: Mapping[Node, str] = MappingProxyType({}),
    *,
    only_largest: bool = False,
) -> Partition:
    """The groups as regions; those that cannot be called at once become several regions, or the largest of these."""

    def repaired(cut: Cut) -> Partition:
        kept, outside = _largest_pieces(program, cut, pieces, reasons) if only_largest else (cut.places, dict(reasons))
        return partition_of(program, kept, [pieces[group] for group in cut.groups], outside)

    try:
        return partition_of(program, places, pieces, reasons)
    except CycleError:
        pass
    try:
        return repaired(cut_into_legal_pieces(program, places))
    except CycleError:  # A symbol that crosses a border adds an edge, which nobody knows before the cut.
        return repaired(cut_into_runs(program, places))


def _largest_pieces(
    program: Program, cut: Cut, pieces: Sequence[Piece], reasons: Mapping[Node, str]
) -> tuple[list[int], dict[Node, str]]:
    """The places without the lesser pieces of each group, and the reasons with those of their nodes."""
    sizes = Counter(place for place in cut.places if place >= 0)
    largest: dict[int, int] = {}
    for piece, group in enumerate(cut.groups):
        if group not in largest or sizes[piece] > sizes[largest[group]]:
            largest[group] = piece
    kept, outside = list(cut.places), dict(reasons)
    for number, piece in enumerate(cut.places):
        if piece >= 0 and largest[cut.groups[piece]] != piece:
            kept[number] = ALONE
            outside[program.index.nodes[number]] = (
                f"it cannot run in one call with the rest of {pieces[cut.groups[piece]].name!r}: "
                "something outside must run in between"
            )
    return kept, outside
