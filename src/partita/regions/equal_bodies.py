"""Which regions of a partition have equal bodies, up to names and values of weights."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

from partita.program.program import Program
from partita.program.structure import Structure, structure_of
from partita.regions.borders import Crossing, Item
from partita.regions.partition import Partition
from partita.regions.region import Region


def body_numbers(partition: Partition) -> list[int]:
    """A number for each region, the same for those with equal bodies, from 0 on in the order of the regions.

    Equal bodies have the same nodes in the same order, read and return the same of their values in the same order, and
    agree in which of their inputs are the same, share a storage or are mutated later.
    """
    known: dict[Hashable, int] = {}
    structure = partition.program.once(structure_of)
    return [
        known.setdefault(_key(partition, at, numbers, structure), len(known))
        for at, numbers in enumerate(partition.numbers())
    ]


def _key(partition: Partition, at: int, numbers: Sequence[int], structure: Structure) -> Hashable:
    letters, mentions, local = structure.letters, structure.mentions, dict[int, int]()
    nodes = []
    for number in numbers:
        read = [local.setdefault(mentioned, len(local)) for mentioned in mentions[number]]
        nodes.append((letters[number], *read))
        local.setdefault(number, len(local))
    border = partition.borders.of_regions[at]
    inputs = tuple(_crossings(border.inputs, local))
    outputs = tuple(_crossings(border.outputs, local))
    mutated = tuple(
        sorted(local[number] for number in _mutated(partition.program, partition.regions[at]) if number in local)
    )
    return tuple(nodes), inputs, outputs, mutated


def _crossings(crossings: Iterable[Crossing], local: dict[int, int]) -> Iterator[Hashable]:
    for crossing in crossings:
        if isinstance(crossing, int):
            yield local.setdefault(crossing, len(local))
        else:
            place = crossing.place if isinstance(crossing, Item) else crossing.axis
            yield type(crossing).__name__, local.setdefault(crossing.number, len(local)), place


def _mutated(program: Program, region: Region) -> Iterator[int]:
    """The nodes of a region, and those it reads, that other nodes mutate later."""
    mutations, number = program.mutations, program.index.number
    if not mutations.mutators:
        return
    names = mutations.names_mutated_outside(region.nodes)
    yield from (number[node] for node in region.nodes if node.name in names)
    yield from (number[node] for node in mutations.later_mutators(region.inputs(), region.nodes))
