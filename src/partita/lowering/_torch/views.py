"""Views outside of compiled code: outputs that only look at an input, or at another output, in another way.

A view that plain torch makes has the history, the version counter and the flags that the body's own would have.
AOTAutograd (torch 2.13) makes views anew from what it noted of them, and loses some of that.
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

__all__ = ["Readable", "Reading", "numbers_for", "readable_from", "views_module"]


#: A node and the keys by which a leaf is read from what it gives.
Reading: TypeAlias = tuple[Node, tuple[Any, ...]]


@final
@dataclass(slots=True)
class Readable:
    """What can be had outside of compiled code, from the values of the `roots`."""

    roots: Sequence[Node]
    #: How each tensor is read, by its id: from a root, or from a step.
    readings: dict[int, Reading] = field(default_factory=dict)
    #: The nodes that are run again, in the order of the body: they give views of roots, or sizes of such.
    steps: dict[Node, None] = field(default_factory=dict)
    #: Nodes that give a tensor which was there before, and nodes that give nothing but numbers and the like.
    same: dict[Node, Reading] = field(default_factory=dict)
    constants: dict[Node, Any] = field(default_factory=dict)
    #: Nodes that give a number which only the body knows, as one that is read from memory: it may be written since.
    numbers: dict[Node, None] = field(default_factory=dict)

    def reading_of(self, value: Any) -> Reading | None:
        """How this very tensor is read; None where only compiled code has it."""
        return self.readings.get(id(value)) if isinstance(value, Tensor) else None


def readable_from(roots: Sequence[Node], run: BodyRun, is_quiet: Callable[[Node], bool]) -> Readable:
    """What can be read from `roots` of all that a run of the body gave.

    Nodes that are not quiet do more than compute, so they cannot run a second time. A list that was changed gives its
    items as it was when it was made; an item that is taken out later is known by what it is, not by its place. What was
    given another shape in place is left to the compiled code: a view that is made again would have the first one.
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
    """A module that gives these leaves, each a view of a root, for the values of the roots and the numbers for them."""
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
    """Whether a number, or the place of a view, comes out of a tensor's memory; fakes have a new symbol for it."""
    given = [run.results[read] for read in input_nodes(node)]
    tensors = sum(isinstance(value, Tensor) for value in given)
    known = {symbol for value in given for symbol in symbols_in(value)}
    if tensors <= 1 and any(map(is_unbacked, known)):
        return False  # What is new then follows from numbers that are known.
    found = (symbol for _, leaf in run.fresh[node] for symbol in symbols_in(leaf))
    return any(is_unbacked(symbol) and symbol not in known for symbol in found)


def _is_constant(value: Any) -> bool:
    """Whether a value is the same for all calls that a compiled function serves, as sizes without symbols are."""
    if isinstance(value, tuple | list):
        return all(map(_is_constant, value))
    return value is None or type(value) in _CONSTANTS


_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _needed(readable: Readable, wanted: Iterable[Node]) -> set[Node]:
    """The nodes between the roots and those that are wanted."""
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
