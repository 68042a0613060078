"""Outputs that are views of inputs or of other outputs, recomputed outside of compiled code.

A view that eager mode makes has the `grad_fn`, the version counter and the flags that the body's own would have.
AOTAutograd (torch 2.13) regenerates views from metadata, and loses some of that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.fx.graph_writer import GraphWriter, input_nodes
from partita._torch.fx.lazy_graph_module import lazy_module
from partita._torch.operators.schemas import is_higher_order, storage_key
from partita._torch.symbolic_shapes import is_unbacked, symbols_in
from partita.lowering._torch.dry_run import BodyRun

#: A node and the keys by which a leaf is read from its result.
Reading: TypeAlias = tuple[Node, tuple[Any, ...]]


@final
@dataclass(slots=True)
class Readable:
    """What can be computed outside of compiled code, from the values of the `roots`."""

    roots: Sequence[Node]
    #: How each tensor is read, by its id: from a root, or from a step.
    readings: dict[int, Reading] = field(default_factory=dict)
    #: The nodes that are recomputed, in the order of the body: views of roots, or sizes of such.
    steps: dict[Node, None] = field(default_factory=dict)
    #: Nodes that return an existing tensor, and nodes that return constants.
    same: dict[Node, Reading] = field(default_factory=dict)
    constants: dict[Node, Any] = field(default_factory=dict)
    #: Nodes that return a number which only the body knows, as one read from memory that may be mutated since.
    numbers: dict[Node, None] = field(default_factory=dict)

    def reading_of(self, value: Any) -> Reading | None:
        """How this tensor object is read; None where only compiled code has it."""
        return self.readings.get(id(value)) if isinstance(value, Tensor) else None


def readable_from(roots: Sequence[Node], run: BodyRun, is_quiet: Callable[[Node], bool]) -> Readable:
    """The results of a run of the body that can be computed from `roots`.

    Nodes that are not quiet have side effects, so they cannot run twice. A list that was mutated is read as it was when
    it was made; an item that is read later is known by its identity, not by its place. Tensors that were reshaped in
    place are left to the compiled code: a recomputed view would have the first shape.
    """
    results = run.results
    found = Readable(roots)
    for root in roots:
        if isinstance(results[root], Tensor) and id(results[root]) not in run.reshaped:
            found.readings.setdefault(id(results[root]), (root, ()))
    memory = {storage_key(results[node]) for node, _ in found.readings.values()}
    whole = {root for root in roots if id(results[root]) not in run.reshaped}
    for node, value in results.items():
        if node in whole or node.op in ("placeholder", "output"):
            continue
        reading = found.reading_of(value)
        if reading is not None:
            found.same[node] = reading
            whole.add(node)
            continue
        runs_again = node.op in ("call_function", "call_method") and is_quiet(node) and not is_higher_order(node.target)
        is_known = runs_again and all(read in whole for read in input_nodes(node)) and not _reads_contents(node, run)
        if is_known and _are_in(memory, run.fresh[node]):
            found.steps[node] = None
            kept = [(keys, leaf) for keys, leaf in run.fresh[node] if id(leaf) not in run.reshaped]
            for keys, leaf in kept:
                found.readings.setdefault(id(leaf), (node, keys))
            if not run.has_changed(node) and len(kept) == len(run.fresh[node]):
                whole.add(node)
        elif runs_again and _is_constant(value):
            found.constants[node] = value
            whole.add(node)
        elif isinstance(value, torch.SymInt):
            found.numbers[node] = None
            whole.add(node)
    return found


def numbers_for(readable: Readable, readings: Sequence[Reading]) -> list[Node]:
    """The nodes whose numbers are needed to read these leaves."""
    needed = _needed(readable, [node for node, _ in readings])
    return [node for node in readable.numbers if node in needed]


def views_module(readable: Readable, readings: Sequence[Reading]) -> GraphModule:
    """A module that computes these leaves, each a view of a root, from the roots and the numbers for them."""
    needed = _needed(readable, [node for node, _ in readings])
    writer = GraphWriter()
    writer.names.reserve(node.name for node in needed)
    env: dict[Node, Any] = dict(readable.constants)
    for root in (*readable.roots, *numbers_for(readable, readings)):
        env[root] = writer.write("placeholder", root.name, name=root.name)

    def read(node: Node, keys: Iterable[Any] = ()) -> Any:
        if node in readable.same:
            return read(*readable.same[node])
        leaf = env[node]
        for key in keys:
            leaf = writer.write("call_function", operator.getitem, (leaf, key), name=writer.names.fresh("item"))
        return leaf

    for node in readable.steps:
        if node in needed:
            env[node] = writer.copy(node, read, name=node.name)
    leaves = tuple(read(*reading) for reading in readings)
    writer.write("output", "output", (leaves,), name=writer.names.fresh("output"))
    return lazy_module(writer.close(), training=False)


def _are_in(memory: set[int], leaves: Iterable[tuple[Any, Any]]) -> bool:
    return all(storage_key(leaf) in memory for _, leaf in leaves if isinstance(leaf, Tensor))


def _reads_contents(node: Node, run: BodyRun) -> bool:
    """Whether a number, or the offset of a view, is read from a tensor's memory; fakes have a new symbol for it."""
    arguments = [run.results[read] for read in input_nodes(node)]
    tensors = sum(isinstance(value, Tensor) for value in arguments)
    known = {symbol for value in arguments for symbol in symbols_in(value)}
    if tensors <= 1 and any(map(is_unbacked, known)):
        return False  # New symbols then follow from known numbers.
    found = (symbol for _, leaf in run.fresh[node] for symbol in symbols_in(leaf))
    return any(is_unbacked(symbol) and symbol not in known for symbol in found)


def _is_constant(value: Any) -> bool:
    """Whether a value is the same for all calls that a compiled function serves, as sizes without symbols are."""
    if isinstance(value, tuple | list):
        return all(map(_is_constant, value))
    return value is None or type(value) in _CONSTANTS


_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _needed(readable: Readable, wanted: Iterable[Node]) -> set[Node]:
    """The nodes from the roots to the wanted ones."""
    found: set[Node] = set(readable.roots)
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node in readable.same:
            waiting.append(readable.same[node][0])
        elif node in readable.numbers:
            found.add(node)
        elif node not in found and node in readable.steps:
            found.add(node)
            waiting += input_nodes(node)
    return found
