"""What crosses into and out of each region, so that only tensors and symbolic numbers do.

Items of a container are taken out on the side of its producer. A container that is still used whole on another side
crosses item by item and is rebuilt there. A region also gets every symbol in the shapes of its inputs, and what its
copies of scalars are computed from.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from torch import nn
from torch.fx import GraphModule

from partita.analysis.index import Index
from partita.analysis.nodes import container_items, crossing_places, find, value_of
from partita.analysis.symbols import Dimension, Symbols
from partita.errors import RegionError
from partita.program.program import Program
from partita.solvers.quotient import ALONE, NOWHERE


class Item(NamedTuple):
    """One item of the container that a node returns."""

    number: int
    place: int


@dataclass(frozen=True, slots=True)
class Constant:
    """The number among the operands of a node, which a tensor replaces."""

    number: int
    place: int


#: What crosses a border: a node's value, an item of its container, the size of one dimension of its tensor, or a
#: number of the graph.
Crossing = int | Item | Dimension | Constant

#: For each scalar that several regions read, the regions that compute it for themselves.
Copies = Mapping[int, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Border:
    """The inputs and outputs of a region, each in order of first use; dicts serve as ordered sets.

    `modules` are reads of bodies of higher-order operators, which move inside instead of crossing. `empty` are
    containers without items, such as the size of a scalar, which are rebuilt inside.
    """

    inputs: dict[Crossing, None]
    outputs: dict[int | Item, None]
    modules: dict[int, None]
    empty: dict[int, None]


@dataclass(frozen=True, slots=True)
class Borders:
    """The borders of all regions, the containers that cross item by item, and the edges that symbols add."""

    of_regions: tuple[Border, ...]
    taken_apart: dict[int, tuple[object, ...]]
    symbol_edges: tuple[tuple[int, int], ...]

    def with_outputs_in_graph_order(self) -> Borders:
        """The same borders, with outputs that do not depend on who reads them first."""
        ordered = (
            replace(border, outputs=dict.fromkeys(sorted(border.outputs, key=_place))) for border in self.of_regions
        )
        return replace(self, of_regions=tuple(ordered))

    def with_constants(self, constants: Iterable[tuple[int, Constant]]) -> Borders:
        """The same borders, across which these constants come into regions, after all else."""
        inputs = [dict(border.inputs) for border in self.of_regions]
        for region, constant in constants:
            inputs[region].setdefault(constant)
        changed = (replace(border, inputs=own) for border, own in zip(self.of_regions, inputs, strict=True))
        return replace(self, of_regions=tuple(changed))


def _place(output: int | Item) -> tuple[int, int]:
    return (output, -1) if isinstance(output, int) else output


def item_taken(index: Index, number: int) -> object:
    """The item that a node takes out of a container: a crossing, or the constant that it is known to be."""
    (source,), place = index.inputs(number), index.nodes[number].args[1]
    items = container_items(index.nodes[source])
    assert isinstance(place, int)
    if items is None:
        return Item(source, place)
    known = place + len(items) if place < 0 else place
    return Item(source, known) if known in crossing_places(items) else items[known]


def settle_projections(owner: list[int], program: Program, *, keeps_alone: bool = False) -> frozenset[int]:
    """Assigns every node that takes an item out of a container to the region of the container's producer.

    With `keeps_alone`, those of a region that holds nothing else stay in it; returns their numbers.
    """
    index, projections = program.index, program.projections
    kept = frozenset(_alone_in_their_region(owner, program)) if keeps_alone and projections else frozenset()
    for number in projections:
        if number not in kept:
            made_in = owner[index.sources[index.starts[number]]]
            owner[number] = ALONE if made_in == NOWHERE else made_in
    return kept


def settle_scalars(owner: list[int], program: Program) -> Copies:
    """Assigns truth values and symbolic floats to the region that reads them; copies, where several do.

    torch 2.13 cannot save a body with such an input. They are cheap and follow from symbolic integers, which can cross.
    No cycle can arise: a region only waits for more of what its values were computed from.
    """
    index = program.index
    read_in: dict[int, frozenset[int]] = {}
    copies: dict[int, frozenset[int]] = {}
    allowed = _MOST_COPIES + _COPIES_OF_NODE * len(index)
    # The last one first, since the inputs of a scalar go where the scalar goes.
    for number in sorted(program.symbolic_scalars, reverse=True):
        readers = [index.number[user] for user in index.nodes[number].users] or [number]
        owners = frozenset[int]().union(*(read_in.get(at, {max(owner[at], ALONE)}) for at in readers))
        read_in[number] = owners
        if len(owners) == 1:
            (owner[number],) = owners
        else:
            owner[number] = ALONE if ALONE in owners else NOWHERE
            copies[number] = owners - {ALONE}
            allowed -= len(owners)
            if allowed < 0:
                raise RegionError(
                    f"{len(owners)} regions would compute {index.nodes[number].name!r} and what it depends on for "
                    "themselves, too often in all: symbolic floats and truth values do not cross between regions of an "
                    "exported program; make fewer regions"
                )
    return copies


#: How many copies of scalars a partition may have, and how many more for each node.
_MOST_COPIES, _COPIES_OF_NODE = 20_000, 8


def borders_of(
    owner: list[int], regions: int, program: Program, *, passes_symbols: bool, copies: Copies, kept: Collection[int]
) -> Borders:
    """The borders, found in one sweep over the data edges; `kept` are nodes that take an item from another region."""
    index, toggles = program.index, program.modes.toggles
    borders = tuple(Border({}, {}, {}, {}) for _ in range(regions))
    sweep = _Sweep(owner, index, program.graph_module, borders, passes_symbols=passes_symbols)
    for source, target in index.edges():
        made, used = owner[source], owner[target]
        if made == used or (made < 0 and used < 0) or target in toggles or source in toggles:
            continue
        if target in kept:
            sweep.cross_item(made, target)
        elif used not in copies.get(source, ()):
            sweep.cross(source, made, used)
    for target, readers in copies.items():
        for source, used in product(index.inputs(target), sorted(readers)):
            if used != owner[source] and used not in copies.get(source, ()):
                # The graph has no data edge to a copy.
                sweep.cross(source, owner[source], used)
                sweep.wait_for(source, used)
    sweep.drop_known_sizes()
    return Borders(sweep.borders, sweep.taken_apart, tuple(sweep.symbol_edges))


def _alone_in_their_region(owner: list[int], program: Program) -> Iterator[int]:
    nodes, held = program.index.nodes, Counter(owner)
    items = [
        number
        for number in program.projections
        if nodes[number].target is operator.getitem and not isinstance(value_of(nodes[number]), tuple | list)
    ]
    taking = Counter(owner[number] for number in items)
    yield from (number for number in items if owner[number] >= 0 and taking[owner[number]] == held[owner[number]])


class _Sweep:
    """The borders found so far."""

    def __init__(
        self, owner: list[int], index: Index, root: GraphModule, borders: tuple[Border, ...], *, passes_symbols: bool
    ) -> None:
        self.owner, self.index, self.root, self.borders = owner, index, root, borders
        self.passes_symbols = passes_symbols
        self.symbols = Symbols(index)
        self.taken_apart: dict[int, tuple[object, ...]] = {}
        self.symbol_edges: list[tuple[int, int]] = []
        self.sizes_read: dict[int, dict[Dimension, object]] = {}
        self._whole: dict[int, bool] = {}

    def cross(self, source: int, made: int, used: int) -> None:
        if used >= 0 and self._is_module(source):
            self.borders[used].modules.setdefault(source)
            return
        if used >= 0 and source in self.borders[used].inputs:
            return
        crossings: tuple[int | Item, ...] = (source,)
        if not self._crosses_whole(source):
            items = self.taken_apart[source]
            crossings = tuple(Item(source, place) for place in crossing_places(items))
            if used >= 0 and not items:
                self.borders[used].empty.setdefault(source)
        if made >= 0:
            for crossing in crossings:
                self.borders[made].outputs.setdefault(crossing)
        if used >= 0:
            for crossing in crossings:
                self.borders[used].inputs.setdefault(crossing)
            if self.passes_symbols:
                self._add_symbols(source, used)

    def cross_item(self, made: int, target: int) -> None:
        """Crosses one item of a container, unless it is a constant, from its producer to the node that takes it."""
        crossing = item_taken(self.index, target)
        if isinstance(crossing, Item) and self.index.nodes[target].users:
            if made >= 0:
                self.borders[made].outputs.setdefault(crossing)
            self.borders[self.owner[target]].inputs.setdefault(crossing)
            if self.passes_symbols:
                self._add_symbols(target, self.owner[target])

    def drop_known_sizes(self) -> None:
        """Removes sizes that were added for a symbol which crosses into the region anyway."""
        for region, sizes in self.sizes_read.items():
            inputs = self.borders[region].inputs
            crossing = {self.symbols.symbol_at(number) for number in inputs if isinstance(number, int)}
            for dimension, symbol in sizes.items():
                if symbol in crossing:
                    del inputs[dimension]

    def _is_module(self, source: int) -> bool:
        node = self.index.nodes[source]
        return node.op == "get_attr" and isinstance(find(self.root, str(node.target)), nn.Module)

    def _crosses_whole(self, source: int) -> bool:
        whole = self._whole.get(source)
        if whole is None:
            items = container_items(self.index.nodes[source])
            whole = self._whole[source] = items is None or any(isinstance(item, tuple | list) for item in items)
            if not whole:
                assert items is not None
                self.taken_apart[source] = items
        return whole

    def _add_symbols(self, source: int, used: int) -> None:
        for definition, symbol in self.symbols.sources(source):
            if isinstance(definition, Dimension):
                self.borders[used].inputs.setdefault(definition)
                self.sizes_read.setdefault(used, {})[definition] = symbol
                continue
            read_in = self.owner[definition]
            if read_in == used:
                continue
            self.borders[used].inputs.setdefault(definition)
            if read_in >= 0:
                self.borders[read_in].outputs.setdefault(definition)
            self.wait_for(definition, used)

    def wait_for(self, source: int, used: int) -> None:
        if self.owner[source] != NOWHERE:
            self.symbol_edges.append((source, self._first[used]))

    @cached_property
    def _first(self) -> dict[int, int]:
        """The first node of each region; only needed for symbols that one region computes for another."""
        first: dict[int, int] = {}
        for number, region in enumerate(self.owner):
            first.setdefault(region, number)
        return first
