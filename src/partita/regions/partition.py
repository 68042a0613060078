"""Partition: disjoint regions without cycles between them, and errors that name a cycle and its repair."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import final

from torch.fx import Node

from partita.analysis.number_operands import NumberOperand, number_operand
from partita.errors import CycleError, RegionError
from partita.program.program import Program, counted_operators
from partita.regions.borders import Borders, Constant, Copies, borders_of, settle_projections, settle_scalars
from partita.regions.region import Region
from partita.solvers.quotient import ALONE, NOWHERE, Quotient, quotient


@final
class Partition:
    """Regions of one program that can be called one after another; an illegal one cannot be built.

    `owner[i]` says where node `i` runs (the index of a region, or outside), with items of containers in the region of
    the producer; `order` is the order of the calls: regions by index, single nodes from `len(regions)` on.
    Regions get every symbol in the shapes of their inputs, or else, without `passes_symbols`, cannot be compiled
    apart. Without `passes_scalars`, as in exported programs and in Dynamo's, since Inductor neither takes nor returns
    them, truth values and symbolic floats are computed where they are read; `copies` are those that several regions
    read. With `keeps_item_regions`, a region that only takes items out of containers stays one, `kept`, instead of
    losing all of its nodes. `constants` are the numbers of the graph that are passed to regions, by their nodes.
    """

    __slots__ = (
        "borders", "constants", "copies", "kept", "order", "owner", "program", "quotient", "reasons", "regions",
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        regions: Iterable[Region],
        reasons: Mapping[Node, str] | None = None,
        *,
        passes_symbols: bool = True,
        passes_scalars: bool | None = None,
        keeps_item_regions: bool = False,
    ) -> None:
        self.program = program
        self.regions = tuple(region.of(program) for region in regions)
        self.reasons: Mapping[Node, str] = MappingProxyType(dict(reasons or {}))
        self.owner = _owners(program, self.regions)
        self.kept = settle_projections(self.owner, program, keeps_alone=keeps_item_regions)
        is_plain = program.export is None and program.frame is None
        crosses = is_plain if passes_scalars is None else passes_scalars
        self.copies: Copies = {} if crosses else settle_scalars(self.owner, program)
        self.constants: Mapping[int, NumberOperand] = MappingProxyType({})
        self.borders: Borders = borders_of(
            self.owner, len(self.regions), program, passes_symbols=passes_symbols, copies=self.copies, kept=self.kept
        )
        self.quotient: Quotient = quotient(self.owner, len(self.regions), self._edges())
        for at, region in enumerate(self.regions):
            # A region of mode toggles alone has no node to run, yet it is called in its turn.
            self.quotient.first.setdefault(at, program.index.number[region.nodes[0]])
        order = self.quotient.stable_order()
        if order is None:
            raise cycle_error(self.program, [region.name for region in self.regions], self.quotient)
        self.order = order

    def renamed(self, regions: Iterable[Region]) -> Partition:
        """The same partition under other names and labels: `regions` have the same nodes in the same order."""
        made = self._copy()
        made.regions = tuple(region.of(self.program) for region in regions)
        names = {region.name for region in made.regions}
        if len(names) < len(made.regions) or [region.nodes for region in made.regions] != [
            region.nodes for region in self.regions
        ]:
            raise RegionError("other names are for the same nodes in the same order, and each is given once")
        return made

    def returning_in_graph_order(self) -> Partition:
        """The same partition, in which regions return their values in graph order, not in the order of first use."""
        made = self._copy()
        made.borders = self.borders.with_outputs_in_graph_order()
        return made

    def passing_numbers(self, nodes: Iterable[Node]) -> Partition:
        """The same partition, whose regions get the numbers among the operands of these nodes as inputs.

        So regions that differ in them alone have equal bodies.
        """
        constants = dict(self.constants)
        for node in nodes:
            number, operand = self.program.index.number.get(node), number_operand(node)
            if number is None or self.owner[number] < 0 or operand is None:
                raise RegionError(
                    f"{node.name!r} has no number that can be passed to a region: that takes a node in a region, which "
                    "adds, subtracts, multiplies or divides a tensor of known dimensions by a number"
                )
            constants[number] = operand
        made, ordered = self._copy(), sorted(constants.items())
        made.constants = MappingProxyType(dict(ordered))
        crossing = ((self.owner[number], Constant(number, operand.place)) for number, operand in ordered)
        made.borders = self.borders.with_constants(crossing)
        return made

    def constant_nodes(self) -> tuple[Node, ...]:
        """The nodes whose numbers are passed to regions, in graph order."""
        return tuple(self.program.index.nodes[number] for number in self.constants)

    def of_other_regions(self, regions: Iterable[Region]) -> Partition:
        """A partition of the same program into other regions, to which the same numbers are passed."""
        made = Partition(self.program, regions)
        number = self.program.index.number
        return made.passing_numbers(node for node in self.constant_nodes() if made.owner[number[node]] >= 0)

    def _copy(self) -> Partition:
        made = object.__new__(Partition)
        for slot in self.__slots__:
            setattr(made, slot, getattr(self, slot))
        return made

    def __len__(self) -> int:
        return len(self.regions)

    def __iter__(self) -> Iterator[Region]:
        return iter(self.regions)

    def __repr__(self) -> str:
        return f"Partition({len(self.regions)} regions of {self.program!r})"

    def region_of(self, node: Node) -> Region | None:
        """The region in which `node` will run, or None."""
        owner = self.owner[self.program.index.number[node]]
        return self.regions[owner] if owner >= 0 else None

    def operator_count(self, region: Region) -> int:
        """How many operators a region has, as they are counted everywhere: without items that it takes out."""
        counted, number = self.program.once(counted_operators), self.program.index.number
        return sum(number[node] in counted for node in region.nodes)

    def numbers(self) -> list[list[int]]:
        """The nodes that run in each region, by number, in graph order; copies run in several."""
        held: list[list[int]] = [[] for _ in self.regions]
        for number, owner in enumerate(self.owner):
            if owner >= 0:
                held[owner].append(number)
        for number, owners in self.copies.items():
            for owner in owners:
                insort(held[owner], number)
        return held

    def _edges(self) -> Iterator[tuple[int, int]]:
        """Everything that may not be reordered."""
        owner, copies, data = self.owner, self.copies, self.program.index.edges()
        if copies:  # A region that has a copy does not wait for the original.
            data = ((source, target) for source, target in data if owner[target] not in copies.get(source, ()))
        return chain(data, self.program.effects.edges(), self.borders.symbol_edges)


def _owners(program: Program, regions: tuple[Region, ...]) -> list[int]:
    index, toggles = program.index, program.modes.toggles
    nodes, number = index.nodes, index.number
    owner = [ALONE] * len(nodes)
    for op in ("placeholder", "output"):
        for node in index.graph.find_nodes(op=op, sort=False):
            owner[number[node]] = NOWHERE
    names: dict[str, Region] = {}
    for region_at, region in enumerate(regions):
        if names.setdefault(region.name, region) is not region:
            raise RegionError(f"two regions are called {region.name!r}; give each its own name")
        at = -1
        for node in region.nodes:
            # Most nodes follow the one before them in the graph too; the others are looked up.
            at = at + 1 if nodes[at + 1] is node else number.get(node, len(nodes))
            if at == len(nodes):
                raise RegionError(
                    f"region {region.name!r} holds {node.name!r}, which is not a node of this program; "
                    "take the nodes from `program.graph`"
                )
            if owner[at] >= 0:
                raise RegionError(
                    f"regions {regions[owner[at]].name!r} and {region.name!r} overlap: both hold {node.name!r}; "
                    f"remove it from one of them"
                )
            owner[at] = region_at
    for at in toggles:
        owner[at] = NOWHERE
    for node in index.graph.find_nodes(op="get_attr", sort=False):
        owner[number[node]] = ALONE  # Attributes are read outside and passed in.
    return owner


def cycle_error(program: Program, regions: Sequence[str], quotient: Quotient) -> CycleError:
    """An error that names the shortest cycle between the regions of these names, its nodes, and a repair."""
    cycle = quotient.shortest_cycle()
    steps = "; ".join(_step(edge, program, regions, quotient) for edge in cycle)
    repair = _repair(cycle, program, regions, quotient)
    return CycleError(f"cycle exists between partitions! Needed: {steps}. To repair it, {repair}")


def _step(edge: tuple[int, int], program: Program, regions: Sequence[str], quotient: Quotient) -> str:
    nodes, (before, after) = program.index.nodes, quotient.causes[edge]
    one, other = (_called(vertex, program, regions) for vertex in edge)
    link = f"{nodes[before].name} -> {nodes[after].name}"
    if before not in program.index.inputs(after):
        link += ", by their effects"
    return f"{one} before {other} ({link})"


def _called(vertex: int, program: Program, regions: Sequence[str]) -> str:
    alone = vertex - len(regions)
    return f"node {program.index.nodes[alone].name!r}" if alone >= 0 else f"region {regions[vertex]!r}"


def _repair(cycle: Sequence[tuple[int, int]], program: Program, regions: Sequence[str], quotient: Quotient) -> str:
    nodes = program.index.nodes
    names = [regions[vertex] for vertex, _ in cycle if vertex < len(regions)]
    loose = [nodes[vertex - len(regions)].name for vertex, _ in cycle if vertex >= len(regions)]
    advice = []
    if loose:
        advice.append(f"add {', '.join(map(repr, loose))} to {names[0]!r}")
    elif len(names) > 1:
        advice.append(f"merge {' and '.join(map(repr, names))}")
    for came, (vertex, _) in zip((cycle[-1], *cycle), cycle, strict=False):
        entered, left = quotient.causes[came][1], quotient.causes[vertex, _][0]
        if vertex < len(regions) and entered != left:
            apart = f"{nodes[left].name!r} and {nodes[entered].name!r}"
            advice.append(f"put {apart} of {regions[vertex]!r} into different regions")
            break
    unknown = {number for edge in cycle for number in quotient.causes[edge]} & set(program.effects.barriers)
    if unknown:
        advice.append(
            f"declare {', '.join(repr(nodes[number].name) for number in sorted(unknown))} pure if that is true"
        )
    return ", or ".join(advice)
