"""Small runs: those between chosen operators that are not worth a call join a neighbour."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from partita.graphs.modes import Mode
from partita.graphs.program import Program
from partita.policies.idle_nodes import IdleNodes

__all__ = ["absorb_small_runs"]


def absorb_small_runs(
    program: Program, places: Sequence[int], *, chosen_runs: Collection[int], idle: IdleNodes, smallest: int
) -> list[int]:
    """New places, without the runs of fewer than `smallest` operators that are not idle.

    Such a run joins the chosen operator before it if it reads what that makes, else the one after it; where that
    runs under another mode, the other one, and where both do, none.
    """
    nodes = program.index.nodes
    inside: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        if place >= 0:
            inside.setdefault(place, []).append(number)
    runs, into = sorted(inside), dict[int, int]()
    for at, run in enumerate(runs):
        busy = (number for number in inside[run] if nodes[number] not in idle)
        if run in chosen_runs or len(list(islice(busy, smallest))) == smallest:
            continue
        before, after = runs[max(at - 1, 0)], runs[min(at + 1, len(runs) - 1)]
        reads = any(places[read] == before for number in inside[run] for read in program.index.inputs(number))
        for neighbour in (before, after) if reads else (after, before):
            if neighbour != run and _modes(program, inside[neighbour]) >= _modes(program, inside[run]):
                into[run] = neighbour
                break
    return [into.get(place, place) for place in places]


def _modes(program: Program, numbers: Iterable[int]) -> set[Mode]:
    return {program.modes.at(number) for number in numbers}
