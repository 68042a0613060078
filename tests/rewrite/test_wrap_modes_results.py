"""What can be done with a wrapped program: compiled, cut again, inlined, exported, whatever its names and hooks are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.core import text
from tests.rewrite.helpers import (
    BRAIN,
    Function,
    assert_same,
    has_toggles_anywhere,
    outcome,
    square,
    traced,
    tree,
    wrapped,
)
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from partita import Program, fingerprint, gather, inline, plan, verify
from partita._torch.toggles import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD
from partita.analysis.modes import AMBIENT
from partita.errors import CycleError
from partita.policies import ByLabel, ByMode
from partita.rewrite.mode_nodes import OperatorFamily
from partita.treatments import Call, Mode

both_families = pytest.mark.parametrize("operators", ["partita", "torch"])
no_grad, enable_grad, autocast = torch.no_grad, torch.enable_grad, torch.autocast


def nested(x: Tensor) -> Any:
    first = x @ x
    with no_grad():
        second = first @ x
        with autocast("cpu", dtype=BRAIN, cache_enabled=False):
            third = second @ x
            with enable_grad():
                fourth = third @ x
    return first, third, fourth


def writing(x: Tensor) -> Any:
    y = x * 2
    before = y.sum()
    with no_grad():
        y.mul_(3)
    between = y.sum()
    with autocast("cpu", dtype=BRAIN):
        z = y @ y
        y.add_(1)
    return before, between, z, y.sum()


@both_families
def test_a_wrapped_program_compiles_whole(operators: OperatorFamily) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(wrapped(traced(nested, square()), operators).module(), backend="aot_eager", fullgraph=True)
    assert_same(outcome(compiled, square()), outcome(nested, square()))


@both_families
@pytest.mark.parametrize("function", [nested, writing])
def test_a_wrapped_program_can_be_cut_anywhere_and_inlined_to_the_flat_one(
    function: Function, operators: OperatorFamily
) -> None:
    after = wrapped(traced(function, square()), operators)
    flat = traced(function, square()).under(after.caller)
    names = [node.name for node in after.operators()]
    for place in range(1, len(names)):
        halves = ByLabel(lambda node, place=place: "first" if node.name in names[:place] else "second")
        cut = plan(after, halves, Call()).apply()
        verify(flat, cut, (square(),), second_call=False)
        assert fingerprint(inline(cut)) == fingerprint(flat)


def test_gathering_keeps_the_operators_in_order() -> None:
    after = wrapped(traced(writing, square()))
    with pytest.raises(CycleError, match="'no_grad'"):
        ByLabel(lambda node: "part" if node.name in ("mul", "sum_2") else None)(after)
    gathered = gather(ByLabel(lambda node: "part" if node.name in ("sum_2", "autocast") else None)(after))
    assert fingerprint(gathered) == fingerprint(after)
    verify(after, gathered, (square(),))


def test_single_calls_can_be_inlined_by_name() -> None:
    after = wrapped(traced(writing, square()))
    assert tree(inline(after, "autocast")) == text(
        """
        mul
        sum_1
        no_grad
            mul_
        sum_2
        _enter_autocast
        matmul
        add_
        _exit_autocast
        sum_3
        """
    )


def test_names_that_are_taken_are_numbered() -> None:
    root = nn.Module()
    root.no_grad = nn.Linear(3, 3)
    root.register_buffer("autocast", torch.ones(3))
    graph = Graph()
    x = graph.placeholder("no_grad_body")
    graph.call_function(SET_GRAD, (False,))
    first = graph.call_module("no_grad", (x,))
    second = graph.create_node("call_function", torch.add, (first, graph.get_attr("autocast")), name="no_grad_1")
    graph.call_function(SET_GRAD, (True,))
    block = graph.call_function(ENTER_AUTOCAST, ("cpu", BRAIN))
    third = graph.create_node("call_function", torch.mm, (second, second), name="autocast_body")
    graph.call_function(EXIT_AUTOCAST, (block,))
    graph.output((first, second, third))
    program = Program.of(GraphModule(root, graph))
    after = wrapped(program)
    flat = program.under(after.caller)
    verify(flat, after, (square(),))
    assert fingerprint(inline(after)) == fingerprint(flat)
    state = list(program.module().state_dict())
    assert list(after.original_state()) == list(inline(after).module().state_dict()) == state
    assert list(after.module().state_dict()) == ["autocast", "no_grad_1.no_grad.weight", "no_grad_1.no_grad.bias"]


def test_checkpoints_of_the_original_load_into_a_wrapped_program() -> None:
    root = nn.Module()
    root.layer = nn.Linear(3, 3)
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(SET_GRAD, (False,))
    graph.output(graph.call_module("layer", (x,)))
    after = plan(Program.of(GraphModule(root, graph)), ByMode(), Mode()).apply(state_names="original")
    assert list(after.module().state_dict()) == ["layer.weight", "layer.bias"]
    zeros = {"layer.weight": torch.zeros(3, 3), "layer.bias": torch.zeros(3)}
    after.module().load_state_dict(zeros)
    assert after.module()(square()).tolist() == torch.zeros(3, 3).tolist()


def test_hooks_and_the_training_flag_are_kept() -> None:
    module, seen = traced(nested, square()).graph_module, []
    module.eval()
    module.register_forward_hook(lambda *_: seen.append("called"))
    after = wrapped(Program.of(module)).module()
    after(square())
    assert seen == ["called"]
    assert not any(part.training for part in after.modules())


IN_TREE = text(
    """
    no_grad
        add_
        linear
    autocast on cpu bfloat16
        linear_1
    """
)


class Tree(nn.Module):
    """A model that takes and gives trees, counts its calls under no_grad, and casts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, given: dict[str, Tensor], *, factor: int = 2) -> dict[str, Any]:
        with no_grad():
            self.calls.add_(1)
            y = self.layer(given["x"])
        with autocast("cpu", dtype=BRAIN):
            z = self.layer(y)
        return {"y": y, "z": [z, factor]}


def test_operators_of_torch_in_an_unlifted_module_become_ours() -> None:
    program = Program.of(torch.export.export(Tree(), ({"x": square().detach()},), strict=False).module())
    flat = inline(program)
    assert has_toggles_anywhere(flat.graph_module)
    after = wrapped(flat)
    assert after.caller == AMBIENT
    assert tree(after).splitlines()[1:] == [
        "no_grad",
        "    add_",
        "    linear",
        "autocast on cpu bfloat16",
        "    linear_1",
    ]
    verify(program, after, ({"x": square()},))
    returned = after.module()({"x": square()})
    assert returned["z"][1] == 2
    assert returned.keys() == {"y", "z"}


@both_families
def test_an_exported_program_of_torch_goes_flat_and_back(operators: OperatorFamily) -> None:
    exported = torch.export.export(Tree(), ({"x": square().detach()},), strict=False)
    after = wrapped(inline(Program.of(exported)), operators)
    result = after.exported()
    assert tree(result.graph_module) == IN_TREE
    verify(exported.module(), result.module(), ({"x": square()},))
    assert result.graph_signature.buffers_to_mutate == exported.graph_signature.buffers_to_mutate
    assert [spec.kind for spec in result.graph_signature.output_specs] == [
        spec.kind for spec in exported.graph_signature.output_specs
    ]


def test_a_program_that_puts_back_what_it_found_is_right_for_every_caller() -> None:
    exported = torch.export.export(Tree(), ({"x": square().detach()},), strict=False)
    after = wrapped(inline(Program.of(exported)))
    for caller in (no_grad, enable_grad, torch.inference_mode):
        with caller():
            found, expected = after.module()({"x": square()}), Tree()({"x": square()})
        assert torch.equal(found["y"], expected["y"])
        assert (found["z"][0].requires_grad, found["z"][0].dtype) == (expected["z"][0].requires_grad, BRAIN)
