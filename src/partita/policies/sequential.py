"""Sequential: the program in graph order, cut before every node that a function marks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch.fx import Node

from partita.errors import OptionError
from partita.graphs.program import Program
from partita.policies.asking import asked
from partita.policies.legal_partition import legal_partition
from partita.policies.places import Piece, no_places, placeable
from partita.regions import Partition

__all__ = ["Sequential"]


@final
@dataclass(frozen=True, slots=True)
class Sequential:
    """A new region begins at each node for which `opens(node)` is true, asked once per operator in graph order.

    A mode toggle that is marked cuts as well; itself it belongs to no region.
    """

    opens: Callable[[Node], object]

    def __post_init__(self) -> None:
        if not callable(self.opens):
            raise OptionError(f"Sequential takes a function that says where a region begins, not {self.opens!r}")

    def __call__(self, program: Program) -> Partition:
        places, last = no_places(program), 0
        can_be_placed = frozenset(placeable(program))
        for node in program.operators():
            number = program.index.number[node]
            last += bool(asked(self.opens, node, node=node, role="predicate"))
            if number in can_be_placed:
                places[number] = last
        used = {place: at for at, place in enumerate(dict.fromkeys(place for place in places if place >= 0))}
        pieces = [Piece(f"part_{at}", at) for at in used.values()]
        return legal_partition(program, [used.get(place, place) for place in places], pieces)
