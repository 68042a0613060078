"""Mode: what runs under a mode runs in the body of an operator that sets it, and results are the same."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.core import listing, text
from tests.rewrite.helpers import (
    BRAIN,
    HALF,
    Function,
    assert_like_eager,
    assert_same,
    has_toggles_anywhere,
    outcome,
    program_of_toggles,
    square,
    traced,
    tree,
    wrapped,
)
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from partita import Program, capture, fingerprint, inline, plan, verify
from partita._torch.toggles import ENTER_INFERENCE, EXIT_INFERENCE
from partita.errors import OptionError, TreatmentError
from partita.policies import ByLabel, ByMode, ByModule
from partita.rewrite.mode_nodes import OperatorFamily
from partita.rewrite.wrap_modes import wrap_modes
from partita.testing.generator.build import dump
from partita.treatments import Call, Mode

Values = tuple[Tensor, ...]
no_grad, enable_grad, autocast = torch.no_grad, torch.enable_grad, torch.autocast


def nested(x: Tensor, w: Tensor) -> Values:
    first = x @ w
    with no_grad():
        second = first @ w
        with autocast("cpu", dtype=BRAIN):
            third = second @ w
            with enable_grad():
                fourth = third @ w
        fifth = fourth + 1
    return first + fifth.float(), fourth


def grad_crosses_autocast(x: Tensor, w: Tensor) -> Values:
    block = autocast("cpu", dtype=BRAIN)
    with block:
        first = x @ w
        torch._C._set_grad_enabled(False)
        second = x @ w
    third = x @ w
    torch._C._set_grad_enabled(True)
    return first, second, third, x @ w


def autocast_crosses_grad(x: Tensor, w: Tensor) -> Values:
    with no_grad():
        first = x @ w
        block = autocast("cpu", dtype=BRAIN)
        block.__enter__()
        second = x @ w
    third = x @ w
    block.__exit__(None, None, None)
    return first, second, third, x @ w


def changing_nothing(x: Tensor, w: Tensor) -> Values:
    with enable_grad():
        first = x @ w
        with enable_grad():
            second = first @ w
    with no_grad(), no_grad():
        third = second @ w
    return first, second, third


def equal_autocasts(x: Tensor, w: Tensor) -> Values:
    with autocast("cpu", dtype=BRAIN):
        first = x @ w
        with autocast("cpu", dtype=BRAIN):
            second = x @ w
        third = x @ w
    return first, second, third


def switched_off_inside(x: Tensor, w: Tensor) -> Values:
    with autocast("cpu", dtype=BRAIN):
        first = x @ w
        with autocast("cpu", enabled=False):
            second = x @ w
            # Values, not leaves: eager would find the leaves in its cache, cast to another dtype.
            with autocast("cpu", dtype=HALF):
                third = second @ second
    with autocast("cpu", enabled=False):
        return first, second, third, x @ w


def grads_in_a_row(x: Tensor, w: Tensor) -> Values:
    with no_grad():
        first = x @ w
        with enable_grad():
            second = x @ w
            with no_grad():
                third = x @ w
        fourth = x @ w
    with no_grad():
        fifth = fourth @ w
    return first, second, third, fourth, fifth, x @ w


NESTS: list[tuple[Function, str]] = [
    (
        nested,
        """
        matmul
        no_grad
            matmul_1
            autocast on cpu bfloat16
                matmul_2
                enable_grad
                    matmul_3
            add
        to
        add_1
        """,
    ),
    (
        grad_crosses_autocast,
        """
        autocast on cpu bfloat16
            matmul
            no_grad
                matmul_1
        no_grad
            matmul_2
        matmul_3
        """,
    ),
    (
        autocast_crosses_grad,
        """
        no_grad
            matmul
            autocast on cpu bfloat16
                matmul_1
                enable_grad
                    matmul_2
        matmul_3
        """,
    ),
    (
        changing_nothing,
        """
        matmul
        matmul_1
        no_grad
            matmul_2
        """,
    ),
    (
        equal_autocasts,
        """
        autocast on cpu bfloat16
            matmul
            matmul_1
            matmul_2
        """,
    ),
    (
        switched_off_inside,
        """
        autocast on cpu bfloat16
            matmul
            no autocast on cpu
                matmul_1
                autocast on cpu float16
                    matmul_2
        no autocast on cpu
            matmul_3
        """,
    ),
    (
        grads_in_a_row,
        """
        no_grad
            matmul
        matmul_1
        no_grad
            matmul_2
            matmul_3
            matmul_4
        matmul_5
        """,
    ),
]
every_nest = pytest.mark.parametrize(("function", "expected"), NESTS, ids=[nest[0].__name__ for nest in NESTS])


@every_nest
@pytest.mark.parametrize("operators", ["partita", "torch"])
def test_nests_become_nested_operators(function: Function, expected: str, operators: OperatorFamily) -> None:
    assert tree(assert_like_eager(function, square(), square(), operators=operators)) == text(expected)


@every_nest
def test_inlining_gives_the_flat_program_back(function: Function, expected: str) -> None:
    flat = traced(function, square(), square())
    after = wrapped(flat)
    before = flat.under(after.caller)
    inlined = inline(after)
    assert fingerprint(inlined) == fingerprint(before)
    assert tree(wrapped(inlined)) == tree(after) == text(expected)
    verify(before, inlined, (square(), square()))


@every_nest
def test_wrapping_twice_changes_nothing(function: Function, expected: str) -> None:
    after = wrapped(traced(function, square(), square()))
    again = wrapped(after)
    assert fingerprint(again) == fingerprint(after)
    assert again.caller == after.caller
    assert listing(again) == listing(after)
    assert [name for name, _ in again.module().named_modules()] == [name for name, _ in after.module().named_modules()]
    assert wrap_modes(after) is after


@every_nest
def test_the_modes_while_the_treatment_runs_do_not_matter(function: Function, expected: str) -> None:
    flat = traced(function, square(), square())
    expected_fingerprint = fingerprint(wrapped(flat))
    for ambient in (no_grad(), torch.inference_mode(), autocast("cpu", dtype=HALF)):
        with ambient:
            assert fingerprint(wrapped(Program.of(flat.graph_module))) == expected_fingerprint


@every_nest
@pytest.mark.parametrize("operators", ["partita", "torch"])
def test_the_input_program_stays_as_it_is(function: Function, expected: str, operators: OperatorFamily) -> None:
    module = traced(function, square(), square()).graph_module
    before, metas = dump(module), [dict(node.meta) for node in module.graph.nodes]
    attributes = {**vars(module)}
    after = wrapped(Program.of(module), operators)
    assert dump(module) == before
    assert [dict(node.meta) for node in module.graph.nodes] == metas
    assert vars(module) == attributes
    assert not any(hasattr(node, "_partita") for node in module.graph.nodes)
    shared = {id(node.meta) for node in module.graph.nodes}
    inside = (body for body in after.module().modules() if isinstance(body, GraphModule))
    assert not any(id(node.meta) in shared for body in inside for node in body.graph.nodes)


def test_a_call_carries_what_it_gives_and_where_it_belongs() -> None:
    after = wrapped(traced(nested, square(), square()))
    call, body = after.node("no_grad"), after.node("no_grad_body")
    assert [(value.dtype, value.shape) for value in call.meta["val"]] == [(BRAIN, (3, 3)), (BRAIN, (3, 3))]
    assert call.meta["torch_fn"] == (
        "partita_set_grad_enabled",
        f"{type(call.target).__name__}.partita_set_grad_enabled",
    )
    assert "nn_module_stack" in call.meta
    assert "nn_module_stack" in body.meta
    for node in call.users:
        assert node.meta["val"] is call.meta["val"][node.args[1]]


def test_operators_of_torch_have_its_names_and_load_without_partita() -> None:
    after = wrapped(traced(nested, square(), square()), "torch")
    targets = {str(node.target) for body in after.module().modules() for node in body.graph.nodes}
    assert {"wrap_with_set_grad_enabled", "wrap_with_autocast"} <= targets
    assert not [target for target in targets if "partita" in target]


def test_torch_has_no_operator_for_inference_and_that_is_said() -> None:
    program = program_of_toggles(in_inference)
    before = dump(program.graph_module)
    with pytest.raises(TreatmentError, match="no operator that runs a body in inference mode") as error:
        wrapped(program, "torch")
    assert "'inference_mode'" in str(error.value)
    assert dump(program.graph_module) == before
    assert tree(wrapped(program)) == "inference_mode\n    neg"


def test_unknown_operators_are_refused() -> None:
    with pytest.raises(OptionError, match='operators of "partita" or of "torch", not of \'mine\''):
        Mode("mine")  # type: ignore[arg-type]


def test_some_regions_may_be_called_and_others_wrapped() -> None:
    program = traced(grad_crosses_autocast, square(), square())
    after = plan(program, ByMode(), {"autocast": Call(), "no_grad": Mode()}).apply()
    (called,) = after.graph.find_nodes(op="call_module")
    assert (called.target, after.node("no_grad").op) == ("autocast", "call_function")
    verify(program.under(after.caller), after, (square(), square()))
    assert fingerprint(inline(after)) == fingerprint(program.under(after.caller))


@pytest.mark.parametrize("operators", ["partita", "torch"])
def test_a_region_that_mixes_modes_calls_the_operators_inside(operators: OperatorFamily) -> None:
    program = traced(nested, square(), square())
    mixed = ByLabel(lambda node: "mixed" if node.name in ("matmul", "matmul_1", "matmul_2", "matmul_3") else None)
    after = plan(program, mixed, Mode(operators)).apply()
    body = after.module().get_submodule("mixed")
    assert isinstance(body, GraphModule)
    assert not has_toggles_anywhere(body)
    assert tree(body).splitlines()[0] == "matmul"
    assert "autocast on cpu bfloat16" in tree(body)
    verify(program, after, (square(), square()))


def test_a_region_in_the_callers_modes_stays_a_plain_call() -> None:
    program = traced(lambda x: x.sin().cos(), square())
    after = plan(program, ByLabel(lambda node: "part" if node.name == "cos" else None), Mode()).apply()
    assert tree(after) == "sin\ncos"
    verify(program, after, (square(),))


def test_regions_of_modules_that_mix_modes_keep_them() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with no_grad():
                y = x.sin()
            return x * y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    program = capture(Net(), (square().detach(),))
    after = plan(program, ByModule("*"), Mode()).apply()
    assert not has_toggles_anywhere(after.exported().graph_module)
    assert_same(outcome(after.module(), square()), outcome(Net(), square()))


def in_inference(graph: Graph, x: Node) -> Node:
    block = graph.call_function(ENTER_INFERENCE, (True,))
    value = graph.call_function(torch.neg, (x,))
    graph.call_function(EXIT_INFERENCE, (block,))
    return value
