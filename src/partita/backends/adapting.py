"""Adapting: changes a body so that compilers built for Dynamo's graphs take it.

Dynamo gives them no plain numbers, in or out, and an input for every symbol. A body of a region has both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.backend_fakes import SYMBOLIC, place_of_symbol, size_carrier, unnamed_sizes
from partita._torch.operators import SYM_SIZE
from partita.backends.calling import Argument, Calling, Carrier, Constant, Input, Output, Result, Size
from partita.backends.notes import Notes
from partita.backends.scalars import scalars_in, scalars_of_inputs

__all__ = ["Adapted", "adapt", "adapt_to_tensors"]


@final
@dataclass(frozen=True, slots=True)
class Adapted:
    """What a compiler is given with an adapted body; how to call what it makes is known when it is done."""

    inputs: tuple[Any, ...]
    given: tuple[Input, ...]
    outputs: tuple[Output, ...]
    arity: int
    notes: Notes

    def calling(self) -> Calling:
        """How to call what the compiler made; asked after it has traced the body."""
        outputs = tuple(map(self.notes.known, self.outputs))
        return Calling(self.given, outputs, self.arity)


def adapt(body: GraphModule, inputs: Sequence[Any]) -> Adapted:
    """Writes plain inputs into the body, takes plain outputs out of it, and adds an input for each unnamed symbol.

    Plain numbers become constants because AOTAutograd would make symbols of them, and take equal ones for one: a 4
    beside a size that happens to be 4 would then have to change with it. Symbols become inputs because torch 2.13
    fails on floats that it computes from a size.
    """
    given = _fold_plain_inputs(body, inputs)
    left = [inputs[argument.place] for argument in given]
    known = scalars_of_inputs(body, left)
    sizes: list[Input] = []
    for place, axis in unnamed_sizes(left):
        _add_input(body, f"size_{axis}_of_{place}")
        sizes.append(Size(given[place].place, axis))
        left.append(left[place].shape[axis])
    notes = Notes(as_tensors=False)
    outputs = _fold_plain_outputs(body, notes, among=scalars_in(body.graph), known=known)
    _drop_annotations(body)
    body.recompile()
    return Adapted(tuple(left), (*given, *sizes), outputs, len(inputs), notes)


def adapt_to_tensors(body: GraphModule, inputs: Sequence[Any]) -> Adapted:
    """Writes plain inputs into the body, takes plain outputs out of it, and reads integers from sizes of tensors.

    For compilers whose functions take and give nothing but tensors. For an integer that is no size of an input, they
    get an empty tensor whose size it is.
    """
    folded = _fold_plain_inputs(body, inputs)
    left = [inputs[argument.place] for argument in folded]
    placeholders = body.graph.find_nodes(op="placeholder")
    given: list[Input] = []
    tensors: list[Any] = []
    for node, argument, value in zip(placeholders, folded, left, strict=True):
        found = place_of_symbol(value, left) if isinstance(value, torch.SymInt) else None
        if found is not None:
            _read_from_size(body, node, placeholders[found[0]], found[1])
            body.graph.erase_node(node)
        elif isinstance(value, torch.SymInt):
            _read_from_size(body, node, node, 0)
            tensors.append(size_carrier(value, left))
            given.append(Carrier(argument.place))
        else:
            tensors.append(value)
            given.append(argument)
    notes = Notes(as_tensors=True)
    outputs = _fold_plain_outputs(body, notes, among=set(body.graph.nodes), known={})
    body.recompile()
    return Adapted(tuple(tensors), tuple(given), outputs, len(inputs), notes)


def _fold_plain_inputs(body: GraphModule, inputs: Sequence[Any]) -> tuple[Argument, ...]:
    left = []
    for place, (node, value) in enumerate(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        if isinstance(value, (Tensor, *SYMBOLIC)):
            left.append(Argument(place))
            continue
        for user in list(node.users):
            user.replace_input_with(node, value)
        body.graph.erase_node(node)
    return tuple(left)


def _add_input(body: GraphModule, name: str) -> Node:
    last = body.graph.find_nodes(op="placeholder")[-1]
    with body.graph.inserting_after(last):
        return body.graph.placeholder(name)


def _read_from_size(body: GraphModule, number: Node, source: Node, axis: int) -> None:
    """Makes the users of `number` read it from the size of an input instead."""
    last = body.graph.find_nodes(op="placeholder")[-1]
    with body.graph.inserting_after(last):
        size = body.graph.call_function(SYM_SIZE, (source, axis))
    number.replace_all_uses_with(size, delete_user_cb=lambda user: user is not size)


def _fold_plain_outputs(
    body: GraphModule, notes: Notes, *, among: set[Node], known: Mapping[Node, Any]
) -> tuple[Output, ...]:
    """Leaves outputs out that are no nodes, or known, and has it noted what those are that may turn out to be plain.

    torch stores no function of a body with such a note in it, so there is none where the number is known before.
    """
    written = body.graph.output_node()
    given = written.args[0]
    assert isinstance(given, tuple | list)
    outputs: list[Output] = []
    left: list[Node] = []
    for value in given:
        if not isinstance(value, Node):
            outputs.append(Constant(value))
            continue
        if value in known and not isinstance(known[value], SYMBOLIC):
            outputs.append(Constant(known[value]))
            continue
        outputs.append(Result(len(left)))
        if value in among and value not in known:
            with body.graph.inserting_before(written):
                value = body.graph.call_function(notes.noting(), (value, len(left)))
        left.append(value)
    written.args = (tuple(left),)
    return tuple(outputs)


def _drop_annotations(body: GraphModule) -> None:
    """Types of nodes mean nothing to compilers, and as text they keep torch from pickling, and so from caching."""
    for node in body.graph.nodes:
        if node.type is not None:
            node.type = None
