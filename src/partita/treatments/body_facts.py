"""What is known of a body before it is compiled: what it writes, what else it does, and which sizes were symbols."""

from __future__ import annotations

import torch

from partita._torch.symbolic import symbol_of
from partita.graphs.index import Index
from partita.graphs.program import Program
from partita.graphs.values import value_of
from partita.runtime.open_sizes import TracedSymbols
from partita.runtime.rehearsal import Acts

__all__ = ["acts_of", "traced_symbols", "written_inputs"]


def written_inputs(program: Program) -> tuple[int, ...]:
    """The places of inputs that the body writes; all of them where a function that nobody knows may write any."""
    places = {node: place for place, node in enumerate(program.graph.find_nodes(op="placeholder"))}
    written = (program.index.nodes[number] for number in program.effects.written_inputs)
    return tuple(sorted(places[node] for node in written if node in places))


def acts_of(program: Program) -> Acts:
    """What the nodes of a body do beside computing, and which draws show in no output."""
    index, effects = program.index, program.effects
    acting = frozenset(index.nodes[number].name for number in effects.effectful)
    shown = _needed_by(index, len(index) - 1)
    # A module that is set to training later may draw then.
    draws = {*effects.draws, *(index.number[node] for node in program.graph.find_nodes(op="call_module"))} - shown
    return Acts(acting, tuple(index.nodes[number].name for number in sorted(draws)))


def _needed_by(index: Index, number: int) -> set[int]:
    """The nodes whose results reach node `number`."""
    found = {number}
    for at in range(number, -1, -1):
        if at in found:
            found.update(index.inputs(at))
    return found


def traced_symbols(program: Program) -> TracedSymbols:
    """The symbols of traced inputs, numbered in order; an expression of several counts as one of its own."""
    numbers: dict[object, str] = {}
    found: list[tuple[str | None, ...] | str | None] = []

    def name(size: object, place: object) -> str | None:
        if not isinstance(size, torch.SymInt):
            return None
        symbol = symbol_of(size)
        return numbers.setdefault(place if symbol is None else symbol, f"s{len(numbers)}")

    for node in program.graph.find_nodes(op="placeholder"):
        value = value_of(node)
        if isinstance(value, torch.Tensor):
            found.append(tuple([name(size, (node, axis)) for axis, size in enumerate(value.shape)]))
        else:
            found.append(name(value, node))
    return tuple(found)
