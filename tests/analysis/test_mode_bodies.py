"""Modes in the bodies of other operators, at any depth, and in exported programs."""

from __future__ import annotations

import copy
import io
from itertools import product
from typing import Any

import pytest
import torch
from tests.capture.helpers import Model
from tests.capture.helpers import outcome as outcome_of_model
from tests.helpers.core import text
from tests.helpers.selecting import slow_but
from tests.helpers.torch_versions import IS_OLD
from tests.rewrite.helpers import (
    BRAIN,
    assert_like_eager,
    assert_same,
    has_toggles_anywhere,
    outcome,
    square,
    traced,
    tree,
    wrapped,
)
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from partita import Program, capture, fingerprint, hops, inline, mode_tree, plan, verify
from partita._torch.toggles import ENTER_AUTOCAST, EXIT_AUTOCAST, IS_GRAD_ENABLED, SET_GRAD
from partita.analysis.modes import AMBIENT
from partita.errors import ModeError
from partita.policies import ByMode
from partita.rewrite.mode_nodes import OperatorFamily
from partita.rewrite.wrap_modes import wrap_modes
from partita.testing.generator.build import dump
from partita.treatments import Call, Mode

both_families = pytest.mark.parametrize("operators", ["partita", "torch"])
no_grad, enable_grad, autocast = torch.no_grad, torch.enable_grad, torch.autocast


def frozen(x: Tensor) -> Tensor:
    with no_grad():
        y = x.sin()
    return x * y


def cast(x: Tensor) -> Tensor:
    with autocast("cpu", dtype=BRAIN, cache_enabled=False):
        y = x @ x
        with no_grad():
            z = x @ x
    return (y * z).float()


def chosen(x: Tensor, take: Tensor) -> Any:
    with no_grad():
        y = x + 1
    return torch.cond(take, frozen, cast, (x,)) * y


def chosen_twice(x: Tensor, take: Tensor) -> Any:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(take, frozen, cast, (x,))

    return torch.cond(take.logical_not(), cast, inner, (x,))


def chosen_inside(x: Tensor, take: Tensor) -> Any:
    with no_grad():
        y = torch.cond(take, frozen, cast, (x,))
        z = y + 1
    return x * z


@both_families
@pytest.mark.parametrize(
    ("function", "take"),
    slow_but(
        product([chosen, chosen_twice, chosen_inside], [True, False]),
        *[(chosen, True), (chosen, False), (chosen_twice, True), (chosen_inside, False)],
    ),
)
def test_branches_of_cond_are_wrapped_inside(function: Any, take: bool, operators: OperatorFamily) -> None:
    assert_like_eager(function, square(), torch.tensor(take), operators=operators)


def test_the_branches_of_cond_hold_the_operators() -> None:
    flat = traced(chosen, square(), torch.tensor(True))
    before = dump(flat.graph_module)
    after = wrapped(flat)
    assert tree(after) == text(
        """
        no_grad
            add
        cond
            no_grad
                sin
            mul
            autocast on cpu bfloat16
                matmul
                no_grad
                    matmul_1
            mul
            to
        mul
        """
    )
    assert dump(flat.graph_module) == before
    assert fingerprint(wrapped(after)) == fingerprint(after)


def test_only_what_stands_in_a_branch_may_switch_modes() -> None:
    def quiet(x: Tensor, take: Tensor) -> Any:
        return torch.cond(take, frozen, cast, (x,))

    flat = traced(quiet, square(), torch.tensor(True))
    after = wrapped(flat)
    assert not has_toggles_anywhere(after.graph_module)
    assert has_toggles_anywhere(flat.graph_module)
    verify(flat.under(after.caller), after, (square(), torch.tensor(True)))


def nest_of_bodies(innermost: Graph, *operators: Any) -> Program:
    """A program that calls a body through an operator, which calls a body through the next, down to `innermost`."""
    body = GraphModule({}, innermost)
    for operator in reversed(operators):
        graph = Graph()
        x = graph.placeholder("x")
        call = graph.call_function(operator, (graph.get_attr("body"), x))
        graph.output(call)
        body = GraphModule({"body": body}, graph)
    return Program.of(body)


def switching(*, by_value: bool = False) -> Graph:
    graph = Graph()
    x = graph.placeholder("x")
    found: Node | bool = graph.call_function(IS_GRAD_ENABLED) if by_value else True
    block = graph.call_function(ENTER_AUTOCAST, ("cpu", BRAIN, True, False))
    first = graph.call_function(torch.mm, (x, x))
    graph.call_function(SET_GRAD, (False,))
    second = graph.call_function(torch.mm, (x, x))
    graph.call_function(EXIT_AUTOCAST, (block,))
    third = graph.call_function(torch.mm, (x, x))
    graph.call_function(SET_GRAD, (found,))
    graph.output((first, second, third))
    return graph


@pytest.mark.parametrize("by_value", [True, False])
@both_families
def test_bodies_of_bodies_of_bodies_are_wrapped(by_value: bool, operators: OperatorFamily) -> None:
    program = nest_of_bodies(switching(by_value=by_value), hops.call, hops.wrap, hops.call)
    after = wrapped(program, operators)
    assert tree(after) == text(
        """
        partita_call
            partita_wrap
                partita_call
                    autocast on cpu bfloat16
                        mm
                        no_grad
                            mm_1
                    no_grad
                        mm_2
        """
    )
    assert_same(outcome(after.module(), square()), outcome(program.module(), square()))
    assert fingerprint(wrapped(after, operators)) == fingerprint(after)
    flat = inline(after)
    assert [node for node in flat.graph.nodes if node.op == "get_attr"] == []
    assert not by_value or fingerprint(flat) == fingerprint(inline(program))
    assert_same(outcome(flat.module(), square()), outcome(program.module(), square()))


def called_in_two_modes(*, by_value: bool) -> Program:
    graph = Graph()
    x, body = graph.placeholder("x"), graph.get_attr("body")
    first = graph.call_function(hops.call, (body, x))
    found: Node | bool = graph.call_function(IS_GRAD_ENABLED) if by_value else True
    graph.call_function(SET_GRAD, (False,))
    second = graph.call_function(hops.call, (body, x))
    graph.call_function(SET_GRAD, (found,))
    graph.output((first, second))
    return Program.of(GraphModule({"body": GraphModule({}, switching(by_value=by_value))}, graph))


def test_a_body_called_in_two_modes_is_right_in_both() -> None:
    program = called_in_two_modes(by_value=True)
    after = wrapped(program)
    assert_same(outcome(after.module(), square()), outcome(program.module(), square()))
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert [value.requires_grad for pair in after.module()(square()) for value in pair][3:] == [False] * 3


def test_a_body_that_switches_gradients_on_for_good_is_refused_under_no_grad() -> None:
    program = called_in_two_modes(by_value=False)
    before = dump(program.graph_module)
    with pytest.raises(ModeError, match="the body 'body' of node 'body' leaves enable_grad behind"):
        plan(program, ByMode(), Mode())
    assert dump(program.graph_module) == before


def updates_a_buffer(self: Model, x: Tensor) -> Tensor:
    with no_grad():
        self.total.add_(1)
    return self.first(x)


def updates_deep_inside(self: Model, x: Tensor) -> Tensor:
    with autocast("cpu", dtype=BRAIN):
        y = self.first(x)
        with no_grad():
            self.total.add_(1)
    return y


def nest(self: Model, x: Tensor) -> Tensor:
    with no_grad():
        with autocast("cpu", dtype=BRAIN):
            y = self.first(x)
        z = self.second(y.float())
        with enable_grad():
            w = self.second(z)
    return w + self.first(x)


def branches(self: Model, x: Tensor) -> Any:
    with no_grad():
        y = self.first(x)
    return torch.cond(x.sum() > 0, frozen, cast, (y,))


@both_families
@pytest.mark.parametrize("does", [updates_a_buffer, updates_deep_inside, nest, branches])
def test_exported_programs_are_wrapped_saved_and_loaded(does: Any, operators: OperatorFamily) -> None:
    model, x = Model(does), torch.randn(4, 4)
    program = capture(copy.deepcopy(model), (x,))
    after = plan(program, ByMode(), Mode(operators)).apply()
    assert after.caller == AMBIENT
    exported = after.exported()
    assert not has_toggles_anywhere(exported.graph_module)
    # The text has paths of files, too, and a clone may be in a folder of any name.
    readable = exported.graph_module.print_readable(print_output=False)
    assert ("higher_order.partita_" in readable) is (operators == "partita")
    if operators == "partita" or not IS_OLD:  # torch 2.11 deletes its own operators where they only write.
        exported.graph_module.graph.eliminate_dead_code()
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    for caller in (enable_grad, no_grad):
        assert outcome_of_model(loaded, (x,), caller=caller).equals(outcome_of_model(model, (x,), caller=caller))


@pytest.mark.parametrize("does", [updates_a_buffer, updates_deep_inside, nest, branches])
def test_wrapping_an_exported_program_is_what_exporting_it_does(does: Any) -> None:
    x = torch.randn(4, 4)
    program = capture(Model(does), (x,))
    assert tree(wrap_modes(program)) == tree(wrapped(program)) == tree(program.exported().graph_module)
    assert fingerprint(inline(wrapped(program))) == fingerprint(inline(program))


def test_a_region_of_an_exported_program_may_be_called() -> None:
    model, x = Model(nest), torch.randn(4, 4)
    program = capture(copy.deepcopy(model), (x,))
    after = plan(program, ByMode(), Call()).apply()
    assert not has_toggles_anywhere(after.exported().graph_module)
    assert outcome_of_model(after.module(), (x,)).equals(outcome_of_model(model, (x,)))


@pytest.mark.parametrize("arguments", [(), (False,)])
def test_a_mode_or_a_body_given_by_keyword_in_a_graph_is_named(arguments: tuple[bool, ...]) -> None:
    graph = Graph()
    x, body = graph.placeholder("x"), graph.get_attr("body")
    rest = {"wrapped_func": body} if arguments else {"enable_grad": False, "wrapped_func": body}
    graph.output(graph.call_function(hops.wrap_with_set_grad_enabled, arguments, {**rest, "x": x}))
    module = GraphModule({"body": symbolic_trace(lambda x: x.sin())}, graph)
    assert not module(torch.ones(2, requires_grad=True)).requires_grad
    with pytest.raises(ModeError, match="has its mode or its body as a keyword argument"):
        mode_tree(Program.of(module))
