"""Contiguous runs: accepted nodes between two refused ones, in graph order, all in one mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch.fx import Node

from partita.graphs.mode import Mode
from partita.graphs.program import Program
from partita.policies.legal_partition import legal_partition
from partita.policies.places import Piece, no_places, placeable
from partita.regions import Partition

__all__ = ["contiguous_runs", "partition_of_runs"]

#: Told of a node that ends a run, and why.
Breaks = Callable[[Node, str], None]


def contiguous_runs(program: Program, refusal: Callable[[Node], str | None], breaks: Breaks) -> list[list[Node]]:
    """The runs, with attributes that are read in them; each node is asked about once, in graph order.

    Mode toggles are not asked about: what follows one that changes something begins another run.
    """
    runs: list[list[Node]] = [[]]
    mode: Mode | None = None
    for node, at in _nodes_with_modes(program):
        reason = refusal(node)
        if reason is None and None not in (mode, at) and at != mode:
            _break(runs, node, f"it runs under {at}, and what is before it under {mode}", breaks)
            mode = at
        if reason is None:
            runs[-1].append(node)
            mode = at if mode is None else mode
        else:
            _break(runs, node, reason, breaks)
            mode = None
    return [run for run in runs if _holds_operator(run)]


def partition_of_runs(program: Program, runs: Sequence[Sequence[Node]], names: Sequence[str]) -> Partition:
    """A partition with a region for each run that holds an operator."""
    places, can_be_placed = no_places(program), frozenset(placeable(program))
    for place, run in enumerate(runs):
        for node in run:
            number = program.index.number[node]
            if number in can_be_placed:
                places[number] = place
    return legal_partition(program, places, [Piece(name) for name in names])


def _nodes_with_modes(program: Program) -> Iterator[tuple[Node, Mode | None]]:
    """The nodes but for inputs, output and toggles; the mode is None for what means the same in every mode."""
    modes, scalars = program.modes, program.symbolic_scalars
    for number, node in enumerate(program.index.nodes):
        if node.op in ("placeholder", "output") or number in modes.toggles:
            continue
        has_mode = node.op != "get_attr" and number not in scalars
        yield node, modes.at(number) if has_mode else None


def _break(runs: list[list[Node]], node: Node, reason: str, breaks: Breaks) -> None:
    if _holds_operator(runs[-1]):
        breaks(node, reason)
    runs.append([])


def _holds_operator(run: Sequence[Node]) -> bool:
    return any(node.op != "get_attr" for node in run)
