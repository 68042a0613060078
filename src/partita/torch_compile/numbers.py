"""Floats that change from call to call: inputs of Dynamo's graph, of which Inductor may make constants without a guard.

It does so (torch 2.13) with numbers that the graph returns, and with some arguments of operators, such as the last one
of `torch.where`: every later call gets what the first one did.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch.fx import Graph, GraphModule, Node

from partita._torch.symbolic_shapes import NUMBER_FUNCTIONS, symbol_of, symbols_in
from partita.analysis.nodes import value_of
from partita.program.program import Program
from partita.torch_compile._torch.backends import trace_again_with_constants


@final
class Numbers:
    """Numbers among the outputs of a graph, by their places, and the graph that computes them."""

    def __init__(self, places: Sequence[int], graph_module: GraphModule) -> None:
        self._places, self._graph_module = tuple(places), graph_module

    def beside(self, function: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """A function like `function`, which computes the other outputs, that returns these numbers as well."""

        def both(*args: Any) -> Sequence[Any]:
            numbers = self._graph_module(*args)
            outputs = list(function(*args))
            for place, number in zip(self._places, numbers, strict=True):
                outputs.insert(place, number)
            return outputs

        return both


def take_numbers_out(gm: GraphModule) -> Numbers | None:
    """Removes the outputs of Dynamo's graph that are computed from numbers alone; None if there are none."""
    returned = gm.graph.output_node().args[0]
    if not isinstance(returned, tuple | list) or not any(map(_is_number, returned)):
        return None
    program = Program(gm)
    scalars = {program.index.nodes[number] for number in program.symbolic_scalars}
    found = [(place, one) for place, one in enumerate(returned) if _is_number(one) and _follows(one, scalars)]
    if not found:
        return None
    places, nodes = [place for place, _ in found], [node for _, node in found]
    numbers = Numbers(places, _graph_of(gm, nodes))
    gm.graph.output_node().args = (tuple(one for place, one in enumerate(returned) if place not in places),)
    for node in reversed(list(gm.graph.nodes)):
        if (node in nodes or node in scalars) and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return numbers


def _is_number(node: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target is torch.scalar_tensor


def _follows(number: Node, scalars: set[Node]) -> bool:
    """Whether nothing but numbers is computed to get a number; one that is constant, or data-dependent, does not."""
    computed = [node for node in _needed(number) if node is not number and node.op != "placeholder"]
    return bool(scalars.intersection(computed)) and all(node in scalars or _is_integer(node) for node in computed)


def _is_integer(node: Node) -> bool:
    return isinstance(value_of(node), int | torch.SymInt) and node.target in NUMBER_FUNCTIONS


def _needed(node: Node) -> Iterator[Node]:
    """A node and all that it is computed from."""
    seen, waiting = {node}, [node]
    while waiting:
        yield (one := waiting.pop())
        new = [read for read in one.all_input_nodes if read not in seen]
        seen.update(new)
        waiting += new


def _graph_of(gm: GraphModule, results: Sequence[Node]) -> GraphModule:
    """A graph with the inputs of `gm` that returns these results only."""
    needed = {node for result in results for node in _needed(result)}
    graph, copies = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[result] for result in results))
    return GraphModule({}, graph)


def specialize_floats(gm: GraphModule) -> None:
    """Lets Dynamo trace again with the value of a float argument, and a guard, unless the graph only computes with it.

    Inductor makes tensors of the floats in sums and products. Where it does so with one use of a float, it takes its
    value as a constant in all others.
    """
    program = Program(gm)
    scalars = {program.index.nodes[number] for number in program.symbolic_scalars}
    items = [node for node in gm.graph.find_nodes(op="call_method", target="item") if node in scalars]
    unsafe = [node for node in items if not all(map(_is_arithmetic, _readers(node, scalars)))]
    trace_again_with_constants([str(symbol_of(value_of(node))) for node in unsafe])


def specialize_sizes(gm: GraphModule) -> None:
    """Lets Dynamo trace again with the values of floats of which integers are made, as in `x[:int(part * rows)]`.

    A region that has such an integer as an input, or as a size, would need the float, which no region takes.
    AOTAutograd does the same for sizes in its graph.
    """
    items = gm.graph.find_nodes(op="call_method", target="item")
    floats = {symbol_of(value) for node in items if isinstance(value := value_of(node), torch.SymFloat)}
    if floats:
        values = map(value_of, gm.graph.nodes)
        integers = (value for value in values if isinstance(value, torch.SymInt | torch.Tensor))
        read = {symbol for value in integers for symbol in symbols_in(value)}
        trace_again_with_constants(sorted(map(str, floats & read)))


def _readers(scalar: Node, scalars: set[Node]) -> Iterator[Node]:
    """The nodes that read a number, or one that is computed from it."""
    seen, waiting = {scalar}, [scalar]
    while waiting:
        for user in waiting.pop().users:
            if user not in scalars:
                yield user
            elif user not in seen:
                seen.add(user)
                waiting.append(user)


def _is_arithmetic(node: Node) -> bool:
    return node.op == "call_function" and node.target in _ARITHMETIC


_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv)
