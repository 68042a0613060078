"""Places: the piece that each node of a program goes into, by node number, and the partition that this makes.

A place is the number of a piece, or `ALONE` or `NOWHERE` as in the quotient graph. Where places never fall along an
edge, pieces can be called in the order of their numbers, so runs of the graph are always legal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from partita.graphs.program import Program
from partita.policies.naming import distinct_names
from partita.regions import Partition, Region
from partita.regions.borders import settle_projections
from partita.regions.reason import ONLY_SWITCHES
from partita.solvers.quotient import ALONE, NOWHERE

__all__ = ["Piece", "no_places", "partition_of", "placeable", "settled"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What will be a region: the name it asks for, and what the policy calls it."""

    name: str
    label: Hashable = None


def no_places(program: Program) -> list[int]:
    """The places of a program in which every node is left out."""
    places = [NOWHERE if node.op in ("placeholder", "output") else ALONE for node in program.index.nodes]
    for number in program.modes.toggles:
        places[number] = NOWHERE
    return places


def placeable(program: Program) -> Iterator[int]:
    """The nodes that a policy can place, by number, in graph order.

    Mode toggles have no place, items of containers follow the container, and the guards of an exported program check
    its inputs, which is nobody's work but the program's own.
    """
    nodes, toggles, is_first = program.index.nodes, program.modes.toggles, True
    items = settled(program, range(len(nodes)))[1]
    for number, node in enumerate(nodes):
        if node.op in _NO_OPERATORS or number in toggles or number in items:
            continue
        if is_first and _is_guards(node):
            continue
        is_first = False
        yield number


def settled(program: Program, places: Sequence[int]) -> tuple[list[int], frozenset[int]]:
    """`places`, with items of containers beside what makes the container, and the numbers of those items."""
    result = list(places)
    settle_projections(result, program)
    return result, frozenset(program.projections)


def partition_of(
    program: Program, places: Sequence[int], pieces: Sequence[Piece], reasons: Mapping[Node, str] | None = None
) -> Partition:
    """The partition with a region for each piece that holds a node, and a reason for each operator outside."""
    nodes = program.index.nodes
    held: list[list[Node]] = [[] for _ in pieces]
    outside = dict(reasons or {})
    for number, place in enumerate(settled(program, places)[0]):
        if place >= 0:
            held[place].append(nodes[number])
            outside.pop(nodes[number], None)
        elif nodes[number].op not in _NO_OPERATORS and nodes[number] not in outside:
            outside[nodes[number]] = _reason(program, number)
    used = [(piece, tuple(inside)) for piece, inside in zip(pieces, held, strict=True) if inside]
    names = distinct_names(piece.name for piece, _ in used)
    regions = [Region(name, inside, piece.label) for name, (piece, inside) in zip(names, used, strict=True)]
    return Partition(program, regions, outside)


def _is_guards(node: Node) -> bool:
    # The name that `ExportedProgram.module()` gives the check of its inputs, on torch 2.13.
    return node.op == "call_module" and node.target == "_guards_fn"


def _reason(program: Program, number: int) -> str:
    node = program.index.nodes[number]
    if number in program.modes.toggles:
        return ONLY_SWITCHES
    if _is_guards(node):
        return "it checks the inputs of the program"
    if number in program.projecting:
        return "it takes an item out of a container that no region makes"
    return "the policy names no region for it"


_NO_OPERATORS = frozenset(("placeholder", "get_attr", "output"))
