"""What crosses the border of a mode, and what the state, random numbers and errors of a wrapped program are."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from tests.helpers.core import text
from tests.helpers.torch_versions import KEEPS_UNREAD_OPERATORS
from tests.rewrite.helpers import (
    BRAIN,
    assert_like_eager,
    assert_same,
    outcome,
    program_of_toggles,
    square,
    traced,
    tree,
    wrapped,
)
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from partita import Program, fingerprint, inline, verify
from partita._torch.modes import read_ambient
from partita._torch.toggles import ENTER_AUTOCAST, ENTER_INFERENCE, EXIT_AUTOCAST, EXIT_INFERENCE, SET_GRAD
from partita.analysis.modes import AMBIENT
from partita.rewrite.mode_nodes import OperatorFamily

both_families = pytest.mark.parametrize("operators", ["partita", "torch"])
no_grad, autocast = torch.no_grad, torch.autocast


def chunks(x: Tensor) -> Any:
    one, two, three = x.chunk(3)
    with no_grad():
        four = one + two
        parts = four.expand(3, 3).split(1)
    return parts[0] + three, parts


def sorted_values(x: Tensor) -> Any:
    with no_grad():
        values, indices = x.topk(2)
    with autocast("cpu", dtype=BRAIN):
        product = x @ x
    return values * 2, indices, x.gather(1, indices), product


def sizes(x: Tensor) -> Any:
    with no_grad():
        shape = x.size()
        rows = shape[0]
    return x.reshape(-1).view(shape) * rows


def given_back(x: Tensor) -> Any:
    with no_grad():
        y = x.sin()
    return x, y, x, None, 3


def random_numbers(x: Tensor) -> Any:
    first = torch.rand_like(x)
    with no_grad():
        second = torch.nn.functional.dropout(x, 0.5)
        third = torch.rand_like(x)
    return first, second, third, torch.rand_like(x)


def written_input(x: Tensor) -> Any:
    y = x * 2
    before = y.sum()
    with no_grad():
        y.mul_(3)
    between = y.sum()
    with autocast("cpu", dtype=BRAIN):
        z = y @ y
        y.add_(1)
    return before, between, z, y


def a_view_written_outside(x: Tensor) -> Any:
    y = x.detach().clone()
    with no_grad():
        view = y.view(-1)
    view.add_(1)
    with no_grad():
        return y * 2, view


FUNCTIONS = [chunks, sorted_values, sizes, given_back, random_numbers, written_input, a_view_written_outside]


@both_families
@pytest.mark.parametrize("function", FUNCTIONS)
def test_whatever_crosses_a_border_arrives(function: Any, operators: OperatorFamily) -> None:
    program = assert_like_eager(function, square(), operators=operators)
    before = traced(function, square())
    assert fingerprint(inline(program)) == fingerprint(before.under(program.caller))


@both_families
def test_no_container_crosses_a_border(operators: OperatorFamily) -> None:
    for function in (chunks, sorted_values, sizes):
        program = wrapped(traced(function, square()), operators)
        for body in program.module().modules():
            assert isinstance(body, GraphModule)
            returned = body.graph.output_node().args[0]
            if body is not program.module():
                assert all(isinstance(value.meta["val"], Tensor | int) for value in returned)


@both_families
def test_symbolic_sizes_cross_borders(operators: OperatorFamily) -> None:
    def sized(x: Tensor, y: Tensor) -> Any:
        rows = x.shape[0]
        with no_grad():
            z = torch.zeros(rows + 1, 2)
            with autocast("cpu", dtype=BRAIN):
                w = y.expand(rows, 3) @ x.t()
        return z.sum() + rows, w * x.shape[1]

    x = torch.ones(4, 3, requires_grad=True)
    before = traced(sized, x, torch.ones(3), symbolic=True)
    after = wrapped(before, operators)
    for rows in (4, 6):
        given = torch.ones(rows, 3), torch.ones(3)
        assert_same(outcome(after.module(), *given), outcome(sized, *given))
    verify(before.under(after.caller), after, (x, torch.ones(3)))


def asks_for_the_grad_mode(graph: Graph, x: Node) -> Any:
    graph.call_function(SET_GRAD, (False,))
    return graph.call_function(torch.is_grad_enabled), graph.call_function(torch.sin, (x,))


def takes_nothing(graph: Graph, x: Node) -> Any:
    graph.call_function(SET_GRAD, (False,))
    zeros = graph.call_function(torch.zeros, (3,))
    graph.call_function(SET_GRAD, (True,))
    return graph.call_function(torch.add, (zeros, x))


def gives_numbers(graph: Graph, x: Node) -> Any:
    graph.call_function(SET_GRAD, (False,))
    rows = graph.call_method("size", (x, 0))
    total = graph.call_method("item", (graph.call_function(torch.sum, (x,)),))
    graph.call_function(SET_GRAD, (True,))
    return graph.call_function(torch.mul, (x, rows)), total


def takes_and_gives_lists(graph: Graph, x: Node) -> Any:
    parts = graph.call_function(torch.chunk, (x, 3))
    graph.call_function(SET_GRAD, (False,))
    rows = graph.call_function(torch.unbind, (graph.call_function(torch.cat, (parts,)),))
    graph.call_function(SET_GRAD, (True,))
    return graph.call_function(torch.stack, (rows,)), rows


def returns_what_toggles_give(graph: Graph, x: Node) -> Any:
    off = graph.call_function(SET_GRAD, (False,))
    value = graph.call_function(torch.add, (), {"input": x, "other": x, "alpha": 2})
    return {"off": off, "value": [value, x], "on": graph.call_function(SET_GRAD, (True,))}


WRITTEN = [asks_for_the_grad_mode, takes_nothing, gives_numbers, takes_and_gives_lists, returns_what_toggles_give]


@both_families
@pytest.mark.parametrize("write", WRITTEN)
def test_values_that_nobody_traced_cross_as_they_are(write: Any, operators: OperatorFamily) -> None:
    program = program_of_toggles(write)
    after = wrapped(program, operators)
    assert_same(outcome(after.module(), square()), outcome(program.module(), square()))
    closed = program.under(after.caller).modes.final == AMBIENT
    assert not closed or fingerprint(inline(after)) == fingerprint(program.under(after.caller))


def counting(graph: Graph, x: Node) -> Node:
    """A buffer that is only mutated, under no_grad, and the result is unused."""
    seen = graph.get_attr("seen")
    graph.call_function(SET_GRAD, (False,))
    graph.call_function(torch.ops.aten.add_.Tensor, (seen, 1))
    graph.call_function(SET_GRAD, (True,))
    return graph.call_function(torch.neg, (x,))


def with_seen() -> nn.Module:
    root = nn.Module()
    root.register_buffer("seen", torch.zeros(2))
    return root


@pytest.mark.parametrize("operators", ["partita", pytest.param("torch", marks=KEEPS_UNREAD_OPERATORS)])
def test_a_region_that_only_writes_survives_dead_code_elimination(operators: OperatorFamily) -> None:
    after = wrapped(program_of_toggles(counting, with_seen()), operators)
    module = after.module()
    module.graph.eliminate_dead_code()
    module.recompile()
    for _ in range(2):
        module(torch.ones(1))
    assert module.seen.tolist() == [2, 2]
    assert tree(module) == "no_grad\n    add__tensor\nneg"


def net() -> tuple[GraphModule, nn.Module]:
    """A graph that calls modules and reads attributes by dotted paths, under modes; a weight is shared."""
    root = nn.Module()
    root.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Dropout(0.5)])
    root.layers[1].weight = root.layers[0].weight
    root.block = nn.Module()
    root.block.scale = nn.Parameter(torch.full((3,), 0.5))
    root.block.register_buffer("shift", torch.ones(3), persistent=False)
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_module("layers.0", (x,))
    graph.call_function(SET_GRAD, (False,))
    second = graph.call_module("layers.1", (first,))
    scaled = graph.call_function(torch.mul, (second, graph.get_attr("block.scale")))
    block = graph.call_function(ENTER_AUTOCAST, ("cpu", BRAIN))
    third = graph.call_module("layers.0", (scaled,))
    graph.call_function(EXIT_AUTOCAST, (block,))
    graph.call_function(SET_GRAD, (True,))
    dropped = graph.call_module("layers.2", (first,))
    shifted = graph.call_function(torch.add, (third, graph.get_attr("block.shift")))
    graph.output((dropped, shifted, scaled))
    module = GraphModule(root, graph)
    module.block.register_buffer("shift", torch.ones(3), persistent=False)
    return module, root


@both_families
def test_modules_and_dotted_attributes_keep_working_and_weights_stay_shared(operators: OperatorFamily) -> None:
    before, root = net()
    program = Program.of(before)
    after = wrapped(program, operators)
    verify(program.under(after.caller), after, (square(),))
    assert after.original_state().keys() == before.state_dict().keys()
    assert {id(tensor) for tensor in after.module().parameters()} == {id(tensor) for tensor in before.parameters()}
    names = {name for name, _ in after.module().named_parameters(remove_duplicate=False)}
    assert {name.rpartition(".")[2] for name in names} == {"weight", "bias", "scale"}
    assert tree(after) == text(
        """
        layers_0
        no_grad
            layers_1
            mul
            autocast on cpu bfloat16
                layers_2
        layers_3
        add
        """
    )
    inlined = inline(after)
    assert fingerprint(inlined) == fingerprint(program.under(after.caller))
    assert list(inlined.module().state_dict()) == list(before.state_dict())
    assert root.layers[1].weight is root.layers[0].weight


@both_families
def test_the_result_can_be_copied_and_pickled(operators: OperatorFamily) -> None:
    before, _ = net()
    before.eval()
    after = wrapped(Program.of(before), operators).module()
    stored = io.BytesIO()
    torch.save(after, stored)
    stored.seek(0)
    for other in (
        copy.deepcopy(after),
        pickle.loads(pickle.dumps(after)),
        torch.load(stored, weights_only=False),
    ):
        assert tree(other) == tree(after)
        assert other.state_dict().keys() == after.state_dict().keys()
        assert_same(outcome(other, square()), outcome(after, square()))


def fails_inside(graph: Graph, x: Node) -> Node:
    graph.call_function(SET_GRAD, (False,))
    cast = graph.call_function(ENTER_AUTOCAST, ("cpu", BRAIN, True, False))
    block = graph.call_function(ENTER_INFERENCE, (True,))
    product = graph.call_function(torch.mm, (x, x))
    graph.call_function(EXIT_INFERENCE, (block,))
    graph.call_function(EXIT_AUTOCAST, (cast,))
    graph.call_function(SET_GRAD, (True,))
    return product


def test_modes_are_put_back_when_something_inside_raises() -> None:
    after = wrapped(program_of_toggles(fails_inside))
    assert tree(after) == text(
        """
        no_grad
            autocast on cpu bfloat16
                inference_mode
                    mm
        """
    )
    found = read_ambient()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        after.module()(torch.ones(2, 3))
    assert read_ambient() == found
    assert after.module()(torch.ones(2, 2)).is_inference()


@both_families
@pytest.mark.parametrize("enabled", [True, False])
def test_modes_are_put_back_after_an_error_whoever_calls(operators: OperatorFamily, enabled: bool) -> None:
    def wrong(x: Tensor) -> Tensor:
        with no_grad(), autocast("cpu", dtype=BRAIN):
            y = x.sin()
            with torch.enable_grad():
                return x @ y

    module = wrapped(traced(wrong, square()), operators).module()
    with torch.set_grad_enabled(enabled):
        found = read_ambient()
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            module(torch.ones(2, 3))
        assert read_ambient() == found


def test_a_wrapped_program_can_be_traced_again() -> None:
    def block(x: Tensor) -> Tensor:
        with no_grad():
            y = x.sin()
        return x * y

    after = wrapped(traced(block, square()))
    again = make_fx(after.module(), pre_dispatch=True)(square())
    assert_same(outcome(again, square()), outcome(block, square()))
