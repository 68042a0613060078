"""Static facts of a body: the inputs it mutates, its side effects and RNG use, and the symbols of its input sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch.fx import Node

from partita._torch.symbolic_shapes import symbol_of
from partita.analysis.mutation import mutating_nodes
from partita.analysis.nodes import value_of
from partita.analysis.op_effects.calls import CallEffects, storages_of
from partita.analysis.op_effects.modules import may_use_rng
from partita.program.program import Program

__all__ = [
    "EffectfulNodes",
    "TracedSymbols",
    "effectful_nodes",
    "may_write",
    "seen_once",
    "traced_symbols",
    "written_inputs",
]


#: For each input of a body the symbols of its sizes, or its own symbol, by name; None for what was traced as static.
TracedSymbols: TypeAlias = tuple[tuple[str | None, ...] | str | None, ...]


@final
@dataclass(frozen=True, slots=True)
class EffectfulNodes:
    """The nodes of a body, by name, that have side effects, and those that use or may use the RNG."""

    acting: frozenset[str] = frozenset()
    draws: frozenset[str] = frozenset()
    #: Nodes, inputs among them, whose storage is mutated after the body has run.
    written_later: frozenset[str] = frozenset()


def written_inputs(program: Program) -> tuple[int, ...]:
    """The positions of inputs that the body mutates; all of them if it calls an unknown function."""
    places = {node: place for place, node in enumerate(program.graph.find_nodes(op="placeholder"))}
    mutated = (program.index.nodes[number] for number in program.effects.mutated_inputs)
    return tuple(sorted(places[node] for node in mutated if node in places))


def seen_once(program: Program) -> tuple[int, ...]:
    """The positions of inputs whose storage only one node of the body reads, such as the statistics of a batch norm."""
    index, calls = program.index, CallEffects(program.graph_module, program.pure)
    storages = storages_of(index, calls, calls.effectful(program.graph))
    readers: dict[int, set[Node]] = {}
    for i, node in enumerate(index.nodes):
        readers.setdefault(storages.find(i), set()).update(node.users)
    inputs = enumerate(program.graph.find_nodes(op="placeholder"))
    return tuple(place for place, node in inputs if len(readers[storages.find(index.number[node])]) <= 1)


def may_write(program: Program) -> tuple[str, ...]:
    """The names of the nodes of a body that mutate, or may do so when a module is set to training."""
    calls = program.graph.find_nodes(op="call_module")
    modules = (
        node.name
        for node in calls
        if next(program.graph_module.get_submodule(str(node.target)).buffers(), None) is not None
    )
    return tuple(dict.fromkeys((*mutating_nodes(program.graph_module), *modules)))


def effectful_nodes(program: Program, written_later: frozenset[str]) -> EffectfulNodes:
    """The effectful nodes of a body; `written_later` are the nodes whose storage is mutated after it has run."""
    nodes, effects = program.index.nodes, program.effects
    # A module that is set to training later may use the RNG then.
    calls = program.graph.find_nodes(op="call_module")
    modules = (node.name for node in calls if may_use_rng(program.graph_module.get_submodule(str(node.target))))
    draws = (nodes[number].name for number in effects.rng_nodes)
    acting = frozenset(nodes[number].name for number in effects.effectful)
    # An input that the body itself mutates must not be a copy.
    mutated = (nodes[number].name for number in effects.mutated_inputs)
    return EffectfulNodes(acting, frozenset((*draws, *modules)), written_later.difference(mutated))


def traced_symbols(program: Program) -> TracedSymbols:
    """The symbols of traced inputs, numbered in order; a compound expression counts as a symbol of its own."""
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
