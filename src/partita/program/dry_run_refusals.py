"""Which calls of a graph a dry run does not make: torch would end the process, run for long or take much memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from partita._torch.dry_runs import (
    has_kernel_for_fakes,
    is_loop,
    is_of_level,
    may_return_operand,
    refusal_of_call,
    refusal_of_device,
    views_added,
)
from partita._torch.operator_schemas import is_higher_order
from partita._torch.symbolic_shapes import NUMBER_FUNCTIONS
from partita.analysis.nodes import bodies_read, value_of


def refusal_in_graphs(root: GraphModule) -> str | None:
    """Why a call in a graph or one of its bodies cannot run on fake tensors either."""
    for module in root.modules():
        if not isinstance(module, GraphModule):
            continue
        bits: dict[Node, int] = {}
        for node in module.graph.nodes:
            # Each value once: a list of results is an argument of all that takes an item of it.
            why = refusal_of_device((node.args, node.kwargs, value_of(node)))
            if why is None and node.op == "call_function":
                why = _refusal_of_call(node, is_body=module is not root) or _refusal_of_number(node, bits)
            if why is not None:
                return f"node {node.name!r} is not tried: {why}"
    deep = _ViewsOfViews().first_too_deep(root)
    return None if deep is None else f"node {deep.name!r} is not tried: it is a view of more than {_MOST_VIEWS} views"


def refusal_of_numbers(root: GraphModule) -> str | None:
    """Why a number in a graph or one of its bodies is not computed, on fake tensors or by a compiler."""
    for module in root.modules():
        bits: dict[Node, int] = {}
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            why = _refusal_of_number(node, bits) if node.op == "call_function" else None
            if why is not None:
                return f"{node.name!r} is not computed: {why}"
    return None


def _refusal_of_call(node: Node, *, is_body: bool) -> str | None:
    if is_of_level(node.target):
        return "it belongs to a torch.func level"
    if not has_kernel_for_fakes(node.target):
        return "it is an operator of another library that has no fake kernel"
    if is_body and is_loop(node.target):
        return "it is a loop in a body"
    args, kwargs = map_arg((node.args, node.kwargs), value_of)
    return refusal_of_call(node.target, args, kwargs)


#: The most bits of a number that a dry run may compute; its inputs have up to 64.
_MOST_BITS = 100_000


def _refusal_of_number(node: Node, bits: dict[Node, int]) -> str | None:
    """Why a number is not computed: it may have too many bits. Records a bound on its bits."""
    if node.target not in NUMBER_FUNCTIONS or isinstance(value_of(node), Tensor):
        return None
    lengths = [_length(argument, bits) for argument in node.args]
    bits[node] = max(lengths, default=0) + 1
    if node.target in _GROWING:
        if any(isinstance(value, tuple | list) for value in _values(node.args)):
            return "it repeats a container"
        bits[node] = sum(lengths)
    if node.target in _GROWING_FAST:
        by = node.args[1] if len(node.args) > 1 else None
        # Nothing is known of a symbolic or data-dependent exponent, and one that is not finite gives no integer.
        times = abs(by) if isinstance(by, int | float) and math.isfinite(by) else _MOST_BITS
        bits[node] = int(min(lengths[0] * times if node.target in _POWERS else lengths[0] + times, 2 * _MOST_BITS))
    return f"its result may have {bits[node]} bits or more" if bits[node] > _MOST_BITS else None


def _length(argument: Any, bits: Mapping[Node, int]) -> int:
    if isinstance(argument, Node):
        return bits.get(argument, 64)
    return argument.bit_length() if isinstance(argument, int) else 64


def _values(arguments: Iterable[Any]) -> Iterator[Any]:
    return (value_of(argument) if isinstance(argument, Node) else argument for argument in arguments)


_POWERS = (operator.pow, operator.ipow)
_GROWING_FAST = (*_POWERS, operator.lshift, operator.ilshift)
_GROWING = (operator.mul, operator.imul)


#: The most views of which each is a view of the one before: a fake view holds them all (torch 2.13).
_MOST_VIEWS = 100


@dataclass(frozen=True, slots=True)
class _Views:
    """A bound on how many views a value is a view of, one of the other."""

    #: Those of a tensor that is made in the graph or belongs to it.
    inside: int = 0
    #: Those that come on top of the views that an input of the graph is of; None for a value that is no view of one.
    of_input: int | None = None

    @property
    def most(self) -> int:
        """The larger of the two, as if inputs were no views."""
        return max(self.inside, self.of_input or 0)

    def plus(self, count: int) -> _Views:
        """A view of it."""
        return _Views(self.inside + count, None if self.of_input is None else self.of_input + count)

    def with_inputs(self, inputs: _Views) -> _Views:
        """The same in terms of the graph that calls this one with such inputs."""
        return (
            _Views(self.inside) if self.of_input is None else _either((_Views(self.inside), inputs.plus(self.of_input)))
        )


def _either(several: Iterable[_Views]) -> _Views:
    values = list(several)
    of_inputs = [value.of_input for value in values if value.of_input is not None]
    return _Views(max((value.inside for value in values), default=0), max(of_inputs, default=None))


@dataclass(frozen=True, slots=True)
class _Depth:
    """Bounds for the results of a graph, and for all that it computes."""

    results: _Views
    all: _Views

    def called_with(self, inputs: _Views) -> _Depth:
        """The same in terms of the graph that calls this one with such inputs."""
        return _Depth(self.results.with_inputs(inputs), self.all.with_inputs(inputs))


class _ViewsOfViews:
    """Bounds how many views a result is a view of, one of the other, in a graph and the bodies that it runs."""

    def __init__(self) -> None:
        self._in_body: dict[GraphModule, _Depth] = {}
        self._too_deep: Node | None = None

    def first_too_deep(self, root: GraphModule) -> Node | None:
        """A node whose result is a view of too many views."""
        self._depth(root)
        return self._too_deep

    def _depth(self, module: GraphModule) -> _Depth:
        if module not in self._in_body:
            views: dict[Node, _Views] = {}
            deepest, results = _Views(), _Views()
            for node in module.graph.nodes:
                depth = self._of_node(node, views, module)
                views[node], deepest = depth.results, _either((deepest, depth.all))
                results = depth.results if node.op == "output" else results
                if depth.all.most > _MOST_VIEWS and self._too_deep is None:
                    self._too_deep = node
            self._in_body[module] = _Depth(results, deepest)
        return self._in_body[module]

    def _of_node(self, node: Node, views: Mapping[Node, _Views], root: nn.Module) -> _Depth:
        read = _either(views[one] for one in node.all_input_nodes)
        if node.op == "placeholder":
            read = _Views(of_input=0)
        bodies = [self._depth(body).called_with(read) for _, body in bodies_read(root, node.all_input_nodes)]
        if node.op in ("placeholder", "output"):
            results = read
        elif is_higher_order(node.target):
            returns_operand = not bodies or may_return_operand(node.target)
            results = _either((*(body.results for body in bodies), *((read,) if returns_operand else ())))
        else:
            added = views_added(node.target)
            results = _Views() if added is None else read.plus(added)
        return _Depth(results, _either((results, *(body.all for body in bodies))))
