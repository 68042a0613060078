"""Containers that a lowered region gives: as they were, with the tensors of the call in them, or it runs eagerly."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tests.lowering.helpers import Counting, plan_of
from torch import Tensor, nn
from torch.fx import GraphModule, Tracer
from torch.nn.utils.rnn import PackedSequence

from partita import Plan, Program
from partita.backends import Eager
from partita.errors import LoweringError
from partita.treatments import Lower


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    first: Tensor
    second: Any


class Slots:
    __slots__ = ("first",)

    def __init__(self, first: Tensor) -> None:
        self.first = first


class Named(dict[str, Any]):
    """A dict that holds more than its items."""


class Longer(list[Any]):
    """A list that holds more than its items."""


class Triple(tuple[Any, ...]):
    """A tuple that may hold more than its items."""


class Noted(Pair):
    """A named tuple that may hold more than its items."""


def _noted(x: Tensor) -> Noted:
    made = Noted(x, 1)
    made.note = x * 2  # type: ignore[attr-defined]
    return made


#: What a module makes of a tensor, and how the tensors are read from it.
Case = tuple[Callable[[Tensor], Any], Callable[[Any], tuple[Tensor, ...]]]
TAKEN_APART: dict[str, Case] = {
    "tuple": (lambda x: (x, [x + 1]), lambda y: (y[0], y[1][0])),
    "dict": (lambda x: {"a": x, 3: {"b": x + 1}}, lambda y: (y["a"], y[3]["b"])),
    "ordered dict": (lambda x: OrderedDict(a=x * 2, b=[x]), lambda y: (y["a"], y["b"][0])),
    "ordered dict in a list": (lambda x: [OrderedDict(a=OrderedDict(b=x + 1))], lambda y: (y[0]["a"]["b"],)),
    "named tuple": (lambda x: Pair(x + 1, {"a": (x,)}), lambda y: (y.first, y.second["a"][0])),
    "named tuple without attributes": (lambda x: Noted(x + 1, "text"), lambda y: (y.first,)),
    "result of an operator": (lambda x: torch.max(x, 0), lambda y: (y.values, y.indices)),
    "packed sequence": (lambda x: PackedSequence(x * 2, torch.tensor([2, 1])), lambda y: (y.data, y.batch_sizes)),
    "constants": (lambda x: [x, slice(1, 2), range(3), frozenset((1,)), torch.float32, None], lambda y: (y[0],)),
    "nothing": (lambda x: OrderedDict(), lambda y: ()),
}
LEFT_WHOLE: dict[str, Case] = {
    "default dict": (lambda x: defaultdict(list, a=x * 2), lambda y: (y["a"],)),
    "default dict in a dict": (lambda x: {"a": defaultdict(list, b=x * 2)}, lambda y: (y["a"]["b"],)),
    "class of a dict": (lambda x: Named(a=x * 2), lambda y: (y["a"],)),
    "class of a list": (lambda x: Longer([x * 2]), lambda y: (y[0],)),
    "class of a tuple": (lambda x: Triple((x * 2,)), lambda y: (y[0],)),
    "named tuple with an attribute": (_noted, lambda y: (y.first, y.note)),
    "data class": (lambda x: Record(x * 2, [x]), lambda y: (y.first, y.second[0])),
    "data class in a named tuple": (lambda x: Pair(x, Record(x, 1)), lambda y: (y.first, y.second.first)),
    "object with slots": (lambda x: Slots(x * 2), lambda y: (y.first,)),
    "namespace": (lambda x: SimpleNamespace(first=x * 2), lambda y: (y.first,)),
    "dict of Python": (lambda x: UserDict(a=x * 2), lambda y: (y["a"],)),
    "deque": (lambda x: deque([x * 2]), lambda y: (y[0],)),
    "set": (lambda x: {x * 2}, lambda y: tuple(y)),
    "tensor as a key": (lambda x: {x * 2: 1}, lambda y: tuple(y)),
    "slice": (lambda x: [slice(x * 2, None)], lambda y: (y[0].start,)),
    "closure": (lambda x: lambda: x * 2, lambda y: (y(),)),
    "set of numbers": (lambda x: [x, {1}], lambda y: (y[0],)),
}


class Making(nn.Module):
    """A module that no tracer looks into."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


class Around(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = Making(make)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x.sin())


class Leaving(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Making)


def _plan(make: Callable[[Tensor], Any], backend: Any, *, strict: bool = False) -> Plan:
    model = Around(make)
    program = Program.of(GraphModule(model, Leaving().trace(model)), pure=[Making])
    return plan_of(program, Lower(backend, strict=strict))


def _check(made: Any, case: Case, x: Tensor) -> None:
    make, read = case
    expected = make(x.sin())
    assert type(made) is type(expected)
    for ours, theirs in zip(read(made), read(expected), strict=True):
        assert type(ours) is Tensor
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", [Eager(), Counting()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", TAKEN_APART)
def test_a_container_comes_out_with_the_tensors_of_the_call(name: str, backend: Any) -> None:
    decided = _plan(TAKEN_APART[name][0], backend)
    module = decided.apply().module()
    for x in (torch.randn(3), torch.randn(3)):
        _check(module(x), TAKEN_APART[name], x)
    assert not decided.failures


@pytest.mark.parametrize("backend", [Eager(), Counting()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", LEFT_WHOLE)
def test_what_cannot_be_taken_apart_runs_eagerly(name: str, backend: Any) -> None:
    decided = _plan(LEFT_WHOLE[name][0], backend)
    module = decided.apply().module()
    for x in (torch.randn(3), torch.randn(3)):
        _check(module(x), LEFT_WHOLE[name], x)
    assert "cannot be taken apart" in decided.failures[0].reason


def test_what_cannot_be_taken_apart_is_an_error_if_strict() -> None:
    module = _plan(LEFT_WHOLE["data class"][0], Eager(), strict=True).apply().module()
    with pytest.raises(LoweringError, match="an object of type Record, which cannot be taken apart"):
        module(torch.randn(3))


def test_a_size_in_an_object_is_not_that_of_the_trace() -> None:
    module = _plan(lambda x: [slice(0, x.size(0))], Eager()).apply().module()
    assert [module(torch.randn(size))[0] for size in (3, 4, 5)] == [slice(0, 3), slice(0, 4), slice(0, 5)]


@pytest.mark.parametrize("backend", [Eager(), Counting()], ids=lambda backend: backend.name)
def test_lists_and_dicts_that_a_graph_writes_are_plain(backend: Any) -> None:
    def pairs(x: Tensor) -> Pair:
        return Pair(x * 2, {"a": [x + 1, {"b": x}]})

    decided = plan_of(pairs, Lower(backend))
    made = decided.apply().module()(torch.ones(2))
    assert not decided.failures
    assert torch.equal(made.second["a"][0], torch.full((2,), 2.0))
    assert torch.equal(made.second["a"][1]["b"], torch.ones(2))
    assert [type(part) for part in (made.second, made.second["a"], made.second["a"][1])] == [dict, list, dict]


def test_an_ordered_dict_that_crosses_a_border_whole_is_no_input_to_compile_for() -> None:
    decided = plan_of(lambda named: named["a"] * 2, Lower(Counting()))
    module = decided.apply().module()
    assert torch.equal(module(OrderedDict(a=torch.ones(2))), torch.full((2,), 2.0))
    assert "OrderedDict" in decided.failures[0].reason
