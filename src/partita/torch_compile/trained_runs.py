"""Runs of compiled regions that train one after the other, which autograd can record as one node.

A node for each region costs the host time, in the forward and in the backward. One for several is exact where a
backward that reaches one of them reaches all, and where what several of them read is not read after them: then the same
gradients stay None, and the engine of autograd adds up the others in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from partita.torch_compile._torch.direct_training import TrainedFunction
from partita.torch_compile._torch.trained_together import RegionCall, recorded_together

#: The most regions of a run: their gradients are held until all of its backwards have ended, and accumulated then.
_LONGEST = 32


def record_together(cut: GraphModule, trained: Mapping[str, TrainedFunction]) -> None:
    """Calls functions of regions, by the names of their modules, through one function where that is exact."""
    for row in list(_rows(cut, trained)):
        for run in _runs(row, trained):
            _call_together(cut, run, trained)


def _rows(cut: GraphModule, trained: Mapping[str, TrainedFunction]) -> Iterator[list[Node]]:
    """The calls of regions with nothing between them but the reading of results."""
    row: list[Node] = []
    for node in cut.graph.nodes:
        if node.op == "call_module" and str(node.target) in trained and _passes_nodes(node):
            row.append(node)
        elif not _is_item(node):
            yield row
            row = []
    yield row


def _passes_nodes(call: Node) -> bool:
    """Whether the arguments of a region are nodes, and all that reads its results reads one of them."""
    return all(isinstance(arg, Node) for arg in call.args) and all(map(_is_item, call.users))


def _is_item(node: Node) -> bool:
    """Whether a node reads a result of a region; an index into a tensor looks alike."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and source.op == "call_module" and isinstance(node.args[1], int)


def _number(item: Node) -> int:
    """Which result of a region a node reads."""
    number = item.args[1]
    assert isinstance(number, int)
    return number


def _runs(row: Sequence[Node], trained: Mapping[str, TrainedFunction]) -> Iterator[Sequence[Node]]:
    """Parts of a row in which the gradient of the last call flows through all others, and no other leaves the run.

    Nor is it read after a run what several of its calls read: the engine would add that gradient first.
    """
    last_reads = [_last_read(row, at, trained[str(call.target)]) for at, call in enumerate(row)]
    inputs = dict.fromkeys(one for call in row for one in _inputs_with_gradient(call, trained))
    last_reads_of = {one: _last_place(row, one.users) for one in inputs}
    begin = 0
    while begin < len(row):
        end, needed, read = begin, begin, set[Node]()
        for at in range(begin, min(begin + _LONGEST, len(row))):
            for one in _inputs_with_gradient(row[at], trained):
                if one in read:
                    needed = max(needed, last_reads_of[one])
                read.add(one)
            if needed <= at:
                end = at
            needed = max(needed, last_reads[at])
        if end > begin:
            yield row[begin : end + 1]
        begin = end + 1


def _last_read(row: Sequence[Node], at: int, function: TrainedFunction) -> int:
    """The last call of a row that reads the result of a call that has a gradient; beyond all if others read it."""
    place = function.layout.expected[0].place
    readers = {user for item in row[at].users if _number(item) == place for user in item.users}
    return _last_place(row, readers) if readers else len(row)


def _inputs_with_gradient(call: Node, trained: Mapping[str, TrainedFunction]) -> list[Node]:
    """What a call computes a gradient of; a node that is passed twice is there twice."""
    requiring = trained[str(call.target)].layout.requiring
    return [arg for place, arg in enumerate(call.args) if place in requiring and isinstance(arg, Node)]


def _last_place(row: Sequence[Node], readers: Iterable[Node]) -> int:
    """The place in a row of the last of these nodes; beyond all if one runs after the row, -1 if all run before."""
    places = {call: place for place, call in enumerate(row)}
    return max((places.get(one, -1 if one < row[0] else len(row)) for one in readers), default=-1)


def _call_together(cut: GraphModule, run: Sequence[Node], trained: Mapping[str, TrainedFunction]) -> None:
    """Puts one call in the place of a run."""
    inputs = list(dict.fromkeys(arg for call in run for arg in call.args if not _is_result_of(run, arg)))
    places: dict[Any, int] = {node: place for place, node in enumerate(inputs)}
    count = len(inputs)
    for call in run:
        places.update({item: count + _number(item) for item in call.users})
        count += trained[str(call.target)].layout.results.stop
    items = [item for call in run for item in call.users if not set(run).issuperset(item.users)]
    returned = list(dict.fromkeys(places[item] for item in items))
    calls = [RegionCall(trained[str(call.target)], tuple(places[arg] for arg in call.args)) for call in run]
    name = f"{run[0].target}_to_{run[-1].target}"
    vars(cut)[name] = recorded_together(calls, input_count=len(inputs), returned=returned)
    with cut.graph.inserting_before(run[-1]):
        together = cut.graph.create_node("call_module", name, tuple(inputs))
        for item in items:
            result = cut.graph.call_function(operator.getitem, (together, returned.index(places[item])))
            result.meta.update(item.meta)
            item.replace_all_uses_with(result)
    for call in reversed(run):
        for item in list(call.users):
            cut.graph.erase_node(item)
        cut.graph.erase_node(call)
        vars(cut).pop(str(call.target))


def _is_result_of(run: Sequence[Node], arg: object) -> bool:
    return isinstance(arg, Node) and _is_item(arg) and arg.args[0] in run
