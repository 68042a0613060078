"""A partition: disjoint regions that are acyclic together, with the reason for every node left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import final

from torch.fx import Node

from partita.errors import RegionError
from partita.graphs.program import Program
from partita.regions.borders import Borders, borders_of, settle_projections
from partita.regions.cycles import cycle_error
from partita.regions.region import Region
from partita.solvers.quotient import ALONE, NOWHERE, Quotient, quotient

__all__ = ["Partition"]


@final
class Partition:
    """Regions of one program that can be called one after another; an illegal one cannot be built.

    `owner[i]` says where node `i` runs (a region's place, or outside), with items of containers settled beside what
    makes the container; `order` is the order of the calls: regions by place, single nodes from `len(regions)` on.
    Regions get every symbol that the shapes of their inputs mention, or else, without `passes_symbols`, cannot be
    compiled apart.
    """

    __slots__ = ("borders", "order", "owner", "program", "quotient", "reasons", "regions")

    def __init__(
        self,
        program: Program,
        regions: Iterable[Region],
        reasons: Mapping[Node, str] | None = None,
        *,
        passes_symbols: bool = True,
    ) -> None:
        self.program = program
        self.regions = tuple(regions)
        self.reasons: Mapping[Node, str] = MappingProxyType(dict(reasons or {}))
        index, modes, root = program.index, program.modes, program.graph_module
        self.owner = _owners(program, self.regions)
        settle_projections(self.owner, program)
        self.borders: Borders = borders_of(
            self.owner, len(self.regions), index, modes=modes, root=root, passes_symbols=passes_symbols
        )
        self.quotient: Quotient = quotient(self.owner, len(self.regions), self._edges())
        for place, region in enumerate(self.regions):
            # A region of nothing but toggles has no node to run, yet it is called in its turn.
            self.quotient.first.setdefault(place, index.number[region.nodes[0]])
        order = self.quotient.stable_order()
        if order is None:
            raise cycle_error(self.program, self.regions, self.quotient)
        self.order = order

    def __len__(self) -> int:
        return len(self.regions)

    def __iter__(self) -> Iterator[Region]:
        return iter(self.regions)

    def __repr__(self) -> str:
        return f"Partition({len(self.regions)} regions of {self.program!r})"

    def region_of(self, node: Node) -> Region | None:
        """The region in which `node` will run, or None."""
        place = self.owner[self.program.index.number[node]]
        return self.regions[place] if place >= 0 else None

    def numbers(self) -> list[list[int]]:
        """The nodes that run in each region, by number, in graph order."""
        held: list[list[int]] = [[] for _ in self.regions]
        for number, place in enumerate(self.owner):
            if place >= 0:
                held[place].append(number)
        return held

    def _edges(self) -> Iterator[tuple[int, int]]:
        """Everything that may not be reordered."""
        return chain(self.program.index.edges(), self.program.effects.edges(), self.borders.symbol_edges)


def _owners(program: Program, regions: tuple[Region, ...]) -> list[int]:
    index, toggles = program.index, program.modes.toggles
    number = index.number
    owner = [NOWHERE if node.op in ("placeholder", "output") else ALONE for node in index.nodes]
    names: dict[str, Region] = {}
    for place, region in enumerate(regions):
        if names.setdefault(region.name, region) is not region:
            raise RegionError(f"two regions are called {region.name!r}; give each its own name")
        for node in region.nodes:
            at = number.get(node)
            if at is None:
                raise RegionError(
                    f"region {region.name!r} holds {node.name!r}, which is not a node of this program; "
                    "take the nodes from `program.graph`"
                )
            if owner[at] >= 0:
                raise RegionError(
                    f"regions {regions[owner[at]].name!r} and {region.name!r} overlap: both hold {node.name!r}; "
                    f"take it out of one of them"
                )
            owner[at] = place
    for at in toggles:
        owner[at] = NOWHERE
    for node in index.graph.find_nodes(op="get_attr", sort=False):
        owner[number[node]] = ALONE  # Attributes are read outside and passed in.
    return owner
