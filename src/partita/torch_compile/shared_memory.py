"""Inputs of Dynamo's graph that share memory in another way than when it was compiled, and one of which is mutated.

Dynamo compiles again if two inputs are one tensor, but not if one is a view of the other (torch 2.13): what was
compiled for inputs that share no memory would read values from before the mutation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from partita._torch.operator_schemas import storage_key
from partita.analysis.nodes import is_module_state
from partita.program.program import Program
from partita.recompute.operators import restore_rng_in_checkpoints

log = logging.getLogger(__name__)

#: By storage, the inputs that overlap another one: their places, and their offsets in the storage.
Overlaps: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]


def checking_shared_memory(program: Program, args: Sequence[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes of the compiled function of Dynamo's graph one that runs the graph where inputs overlap otherwise.

    It is asked for before the graph is compiled, since compilers edit it. State of modules is not compared: inputs are
    assumed not to alias it.
    """
    placeholders: list[Node] = program.graph.find_nodes(op="placeholder")
    passed = [
        place
        for place, (node, value) in enumerate(zip(placeholders, args, strict=True))
        if isinstance(value, Tensor) and not is_module_state(node)
    ]
    mutates = any(program.mutations.mutators_of(placeholders[place]) for place in passed)
    if len(passed) < 2 or not mutates or any(_is_symbolic(args[place]) for place in passed):
        return lambda function: function
    graph = Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    plain = GraphModule(program.graph_module, graph)
    return lambda function: _Checked(function, plain, passed, overlaps_of(args, passed))


@final
class _Checked:
    """A compiled function, and the graph that runs in its place where other inputs overlap."""

    def __init__(
        self, function: Callable[..., Any], plain: GraphModule, places: Sequence[int], compiled_for: Overlaps
    ) -> None:
        self._function, self._plain = function, plain
        self._places, self._compiled_for = tuple(places), compiled_for
        self._has_warned = False

    def __call__(self, *args: Any) -> Any:
        if overlaps_of(args, self._places) == self._compiled_for:
            return self._function(*args)
        if not self._has_warned:
            # Not before: the graph that is compiled has the same bodies.
            restore_rng_in_checkpoints(self._plain)
            self._has_warned = True
            log.warning(
                "a graph that mutates an input is called with inputs that share memory in another way than those that "
                "it was compiled for; it runs uncompiled"
            )
        return self._plain(*args)


def overlaps_of(args: Sequence[Any], places: Sequence[int]) -> Overlaps:
    """Which of the tensors at these places overlap another one in memory, and where they begin."""
    by_storage: dict[int, list[int]] = {}
    for place in places:
        by_storage.setdefault(storage_key(args[place]), []).append(place)
    if len(by_storage) == len(places):
        return ()
    groups = (_overlapping(args, group) for group in by_storage.values() if len(group) > 1)
    return tuple(tuple((place, args[place].storage_offset()) for place in group) for group in groups if group)


def _overlapping(args: Sequence[Any], places: Sequence[int]) -> list[int]:
    """Those of the tensors in one storage whose bytes begin before another one's end."""
    extents = sorted((*_extent(args[place]), place) for place in places if args[place].numel())
    found, reach, last = set[int](), -1, -1
    for begin, end, place in extents:
        if begin < reach:
            found |= {last, place}
        if end > reach:
            reach, last = end, place
    return [place for place in places if place in found]


def _extent(tensor: Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.itemsize
    steps = sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (steps + 1) * tensor.itemsize


def _is_symbolic(tensor: Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()
    return any(isinstance(number, torch.SymInt) for number in numbers)
