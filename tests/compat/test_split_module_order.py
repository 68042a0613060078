"""Splitting keeps the order of mutations, random number generation and side effects."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tests.compat.split_helpers import CUTS, GETITEM, Cut, Draft, every, in_turn, operators, parts, same
from tests.compat.split_models import check, exported, refused_or_same, x4
from tests.helpers.selecting import slow_but
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import has_side_effect

from partita.errors import CycleError

# Memory ----------------------------------------------------------------------------------------------------------


def test_an_in_place_write_stays_before_a_later_reader_without_a_data_edge(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    y = draft.call(torch.mul, x, 1.0)
    draft.method("add_", y, 5.0)
    module = draft.done(draft.call(torch.mul, y, 2.0))
    check(module, cut(module, in_turn([0, 1, 2])), x4())


def test_an_in_place_write_stays_after_an_earlier_reader(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    y = draft.call(torch.mul, x, 1.0)
    z = draft.call(torch.mul, y, 2.0)
    w = draft.method("add_", y, 5.0)
    module = draft.done((z, w))
    check(module, cut(module, in_turn([0, 2, 1])), x4())


@pytest.mark.parametrize("labels", [[0, 1, 2], [2, 1, 0], [0, 1, 0], [1, 0, 1], [0, 0, 1], [1, 0, 0]])
def test_a_write_to_an_input_keeps_its_place(cut: Cut, labels: list[int]) -> None:
    draft = Draft()
    x = draft.input("x")
    before = draft.call(torch.mul, x, 2.0)
    draft.method("add_", x, 1.0)
    module = draft.done((before, draft.call(torch.mul, x, 3.0)))
    refused_or_same(cut, module, in_turn(labels), x4())


VIEWS: dict[str, Callable[[Draft, Node], Node]] = {
    "view": lambda draft, y: draft.method("view", y, 2, 2),
    "getitem": lambda draft, y: draft.call(GETITEM, y, slice(0, 2)),
    "chunk": lambda draft, y: draft.call(GETITEM, draft.call(torch.chunk, y, 2), 0),
    "detach": lambda draft, y: draft.method("detach", y),
    "reshape": lambda draft, y: draft.call(torch.reshape, y, (2, 2)),
    "expand_as": lambda draft, y: draft.method("expand_as", y, y),
    "data": lambda draft, y: draft.call(getattr, y, "data"),
    "T": lambda draft, y: draft.call(getattr, y, "T"),
}


WRITES: dict[str, Callable[[Draft, Node], Node]] = {
    "add_": lambda draft, y: draft.method("add_", y, 5.0),
    "out": lambda draft, y: draft.call(torch.mul, y, 3.0, out=y),
    "relu_": lambda draft, y: draft.call(torch.nn.functional.relu, y, inplace=True),
    "setitem": lambda draft, y: draft.call(operator.setitem, y, 0, 9.0),
    "iadd": lambda draft, y: draft.call(operator.iadd, y, 9.0),
    "zero_": lambda draft, y: draft.call(torch.zero_, y),
    "aten": lambda draft, y: draft.call(torch.ops.aten.mul_.Tensor, y, 3.0),
    "foreach": lambda draft, y: draft.call(torch._foreach_add_, [y], 1.0),
}


# By default every view with one write, and every write with one view.
@pytest.mark.parametrize(
    ("view", "write"),
    slow_but(
        product(VIEWS, WRITES),
        *((view, next(iter(WRITES))) for view in VIEWS),
        *((next(iter(VIEWS)), write) for write in WRITES),
    ),
)
def test_a_write_through_a_view_is_seen_by_later_readers_of_the_base(view: str, write: str) -> None:
    draft = Draft()
    x = draft.input("x")
    y = draft.call(torch.sub, x, 3.0)
    early = draft.call(torch.mul, y, 2.0)
    WRITES[write](draft, VIEWS[view](draft, y))
    late = draft.call(torch.mul, y, 10.0)
    module = draft.done((early, late, y))
    count = len(operators(module))
    for cut in CUTS.values():
        check(module, cut(module, in_turn(range(count))), x4())
        check(module, cut(module, in_turn(range(count, 0, -1))), x4())
        refused_or_same(cut, module, lambda node: len(node.name) % 2, x4())


@pytest.mark.parametrize("labels", [[0, 1, 0], [1, 0, 1], [0, 1, 1], [0, 0, 1]])
def test_interleaved_parts_around_a_write_are_ordered_or_refused(cut: Cut, labels: list[int]) -> None:
    draft = Draft()
    x, z = draft.input("x"), draft.input("z")
    y = draft.call(torch.mul, x, 1.0)
    draft.method("add_", y, z)
    module = draft.done((draft.call(torch.mul, y, 2.0), y))
    refused_or_same(cut, module, in_turn(labels), x4(), x4())


@pytest.mark.parametrize("labels", [[0, 1, 2], [2, 1, 0], [0, 1, 1], [1, 0, 2], [0, 1, 0]])
def test_a_buffer_update_and_a_later_read_keep_their_order(cut: Cut, labels: list[int]) -> None:
    draft = Draft(count=torch.zeros(4))
    x = draft.input("x")
    early = draft.call(torch.add, x, draft.attr("count"))
    draft.method("add_", draft.attr("count"), 1.0)
    module = draft.done((early, draft.call(torch.add, x, draft.attr("count"))))
    refused_or_same(cut, module, in_turn(labels), x4())


def test_a_batch_norm_and_a_read_of_its_running_mean_keep_their_order(cut: Cut) -> None:
    draft = Draft(norm=nn.BatchNorm1d(3))
    x = draft.input("x")
    early = draft.call(torch.mul, draft.attr("norm.running_mean"), 2.0)
    y = draft.module("norm", x)
    late = draft.call(torch.mul, draft.attr("norm.running_mean"), 3.0)
    module = draft.done((early, y, late))
    for labels in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        check(module, cut(module, in_turn(labels)), torch.randn(5, 3))


def test_two_names_of_one_buffer_are_one_memory(cut: Cut) -> None:
    shared = torch.zeros(4)
    draft = Draft(one=shared, other=shared)
    x = draft.input("x")
    draft.method("add_", draft.attr("one"), x)
    module = draft.done(draft.call(torch.mul, draft.attr("other"), 2.0))
    for labels in ([0, 1], [1, 0]):
        check(module, cut(module, in_turn(labels)), x4())


def test_two_inputs_may_be_one_tensor(cut: Cut) -> None:
    draft = Draft()
    x, y = draft.input("x"), draft.input("y")
    draft.method("add_", x, 1.0)
    module = draft.done(draft.call(torch.mul, y, 2.0))
    for labels in ([0, 1], [1, 0]):
        expected, tensor = x4(), x4()
        wanted = module(expected, expected)
        assert torch.equal(cut(module, in_turn(labels))(tensor, tensor), wanted)


def test_an_output_that_is_a_mutated_input_is_the_input_itself(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    y = draft.method("add_", x, 1.0)
    draft.method("mul_", x, 2.0)
    module = draft.done((y, x))
    tensor = x4()
    first, second = cut(module, every(1))(tensor)
    assert first is second is tensor


def test_a_write_inside_a_body_of_an_operator_is_an_effect_of_its_call(cut: Cut) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            early = self.count * 2
            with torch.no_grad():
                self.count.add_(x)
            return early, self.count * 3

    module = exported(Counting(), x4())
    count = len(operators(module))
    for labels in (
        range(count),
        range(count, 0, -1),
        [at // 2 for at in range(count)],
        [at % 2 for at in range(count)],
    ):
        refused_or_same(cut, module, in_turn(list(labels)), x4())


def test_many_parts_are_called_in_an_order_that_a_chain_allows(cut: Cut) -> None:
    draft = Draft()
    value = draft.input("x")
    for _ in range(100):
        value = draft.call(torch.sin, value)
    module = draft.done(value)
    result = cut(module, every(1))
    assert len(parts(result)) == 100
    check(module, result, x4())


# Random numbers and side effects ---------------------------------------------------------------------------------


DRAWS: dict[str, Callable[[Draft, Node], Node]] = {
    "rand_like": lambda draft, x: draft.call(torch.rand_like, x),
    "dropout": lambda draft, x: draft.call(torch.nn.functional.dropout, x, 0.5),
    "module": lambda draft, x: draft.module("drop", x),
    "rand": lambda draft, x: draft.call(torch.rand, 4),
    "normal_": lambda draft, x: draft.method("normal_", draft.method("clone", x)),
    "aten": lambda draft, x: draft.call(torch.ops.aten.bernoulli.p, x, 0.5),
}


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("second", ["rand_like", "module", "aten"])
def test_random_operators_run_in_their_original_order(first: str, second: str) -> None:
    draft = Draft(drop=nn.Dropout(0.5))
    x = draft.input("x")
    draws = [DRAWS[kind](draft, x) for kind in (first, second, first)]
    module = draft.done(tuple(draws))
    count = len(operators(module))
    for cut in CUTS.values():
        check(module, cut(module, in_turn(range(count))), x4())
        check(module, cut(module, in_turn(range(count, 0, -1))), x4())
        refused_or_same(cut, module, in_turn([0, 1, 0, 1, 0]), x4())


HAPPENED: list[str] = []


@has_side_effect
def note(text: str, x: Any = None) -> None:
    HAPPENED.append(text)


@pytest.mark.parametrize("labels", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 1, 0]])
def test_side_effects_keep_their_order(cut: Cut, labels: list[int]) -> None:
    draft = Draft()
    x = draft.input("x")
    for text in "abc":
        draft.call(note, text)
    module = draft.done(x)
    try:
        result = cut(module, in_turn(labels))
    except CycleError:
        assert labels == [0, 1, 0]
        return
    HAPPENED.clear()
    result(x4())
    assert HAPPENED == ["a", "b", "c"]


def unknown(x: Tensor) -> Tensor:
    """An opaque function that mutates its argument."""
    return x.add_(1.0)


torch.fx.wrap("unknown")


def test_an_unknown_function_keeps_its_place(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    y = draft.call(torch.mul, x, 1.0)
    early = draft.call(torch.mul, y, 2.0)
    draft.call(unknown, y)
    late = draft.call(torch.mul, y, 3.0)
    module = draft.done((early, late))
    for labels in ([0, 1, 2, 3], [0, 3, 2, 1], [3, 2, 1, 0]):
        check(module, cut(module, in_turn(labels)), x4())


def test_asserts_stay_before_what_comes_after_them_in_their_part(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    ok = draft.call(torch.all, x)
    draft.call(torch._assert, ok, "zeros are not welcome")
    module = draft.done(draft.call(torch.mul, x, 2.0))
    result = cut(module, every(1))
    check(module, result, x4())
    with pytest.raises(AssertionError, match="zeros are not welcome"):
        result(torch.zeros(4))


def test_a_part_with_only_side_effects_survives_dead_code_elimination(cut: Cut) -> None:
    draft = Draft(count=torch.zeros(4))
    x = draft.input("x")
    y = draft.call(torch.mul, x, 2.0)
    draft.method("add_", draft.attr("count"), 1.0)
    draft.call(note, "kept", y)
    module = draft.done(y)
    result = cut(module, in_turn([0, 1, 2]))
    result.graph.eliminate_dead_code()
    result.recompile()
    HAPPENED.clear()
    before = result(x4())
    assert HAPPENED == ["kept"]
    assert same(before, x4() * 2)
    assert torch.equal(module.count, torch.ones(4))


def test_dead_code_elimination_inside_a_part_keeps_its_writes(cut: Cut) -> None:
    draft = Draft(count=torch.zeros(4))
    x = draft.input("x")
    draft.call(torch.ops.aten.add_.Tensor, draft.attr("count"), x)
    module = draft.done(draft.call(torch.mul, x, 2.0))
    result = cut(module, in_turn([0, 0]))
    for part in parts(result).values():
        part.graph.eliminate_dead_code()
        part.recompile()
    check(module, result, x4())
