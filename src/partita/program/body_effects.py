"""Static facts of a body: the inputs it mutates, its side effects and RNG use, and the symbols of its input sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch.fx import Node

from partita._torch.symbolic_shapes import symbol_of
from partita.analysis.effects.modules import may_use_rng
from partita.analysis.nodes import value_of
from partita.program.program import Program

#: For each input of a body the symbols of its sizes, or its own symbol, by name; None for what was traced as static.
TracedSymbols: TypeAlias = tuple[tuple[str | None, ...] | str | None, ...]


@final
@dataclass(frozen=True, slots=True)
class BodyEffects:
    """The effects of a body, by the names of its nodes and the positions of its inputs, so that they can be pickled."""

    #: Nodes that mutate, use the RNG, communicate, or have another side effect.
    effectful: frozenset[str] = frozenset()
    #: Nodes that use the RNG, or do so when a module is set to training.
    rng: frozenset[str] = frozenset()
    #: Nodes that mutate, or do so when a module is set to training, in order.
    mutating: tuple[str, ...] = ()
    #: The positions of inputs that are mutated; all of them if an unknown function is called.
    mutated_inputs: tuple[int, ...] = ()
    #: Nodes, inputs among them, whose storage other code mutates after the body has run, where the call site is known.
    mutated_later: frozenset[str] = frozenset()


def body_effects(program: Program, mutated_later: frozenset[str] = frozenset()) -> BodyEffects:
    """The effects of the body that is this program."""
    nodes, effects = program.index.nodes, program.effects
    # A module that is set to training later may use the RNG then, and update its buffers.
    calls = program.graph.find_nodes(op="call_module")
    modules = {node.name: program.graph_module.get_submodule(str(node.target)) for node in calls}
    updating = (name for name, module in modules.items() if next(module.buffers(), None) is not None)
    return BodyEffects(
        effectful=frozenset(nodes[number].name for number in effects.effectful),
        rng=frozenset(
            (
                *(nodes[number].name for number in effects.rng_nodes),
                *(name for name, module in modules.items() if may_use_rng(module)),
            )
        ),
        mutating=tuple(dict.fromkeys((*program.mutations.mutating_nodes(), *updating))),
        mutated_inputs=mutated_inputs(program),
        # An input that the body itself mutates must not be a copy.
        mutated_later=mutated_later.difference(nodes[number].name for number in effects.mutated_inputs),
    )


def mutated_inputs(program: Program) -> tuple[int, ...]:
    """The positions of inputs that the body mutates; all of them if it calls an unknown function."""
    places = {node: place for place, node in enumerate(program.graph.find_nodes(op="placeholder"))}
    mutated = (program.index.nodes[number] for number in program.effects.mutated_inputs)
    return tuple(sorted(places[node] for node in mutated if node in places))


def inputs_read_once(program: Program) -> tuple[int, ...]:
    """The positions of inputs whose storage only one node of the body reads, such as the statistics of a batch norm."""
    index, storages = program.index, program.calls.storages
    readers: dict[int, set[Node]] = {}
    for i, node in enumerate(index.nodes):
        readers.setdefault(storages.find(i), set()).update(node.users)
    inputs = enumerate(program.graph.find_nodes(op="placeholder"))
    return tuple(place for place, node in inputs if len(readers[storages.find(index.number[node])]) <= 1)


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
