"""Cycles in words: which regions need each other, through which nodes, and what would break the cycle."""

from __future__ import annotations

from collections.abc import Sequence

from partita.errors import CycleError
from partita.graphs.program import Program
from partita.solvers.quotient import Quotient

__all__ = ["cycle_error"]


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
        advice.append(f"take {', '.join(map(repr, loose))} into {names[0]!r}")
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
