"""ByMode: the regions are the outermost runs of nodes in modes that differ from the caller's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.analysis.helpers import Script
from tests.helpers.core import text
from tests.rewrite.helpers import BRAIN, HALF, program_of_toggles, square, traced, tree, wrapped
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from partita import Program, hops, plan
from partita._torch.toggles import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    IS_GRAD_ENABLED,
    SET_GRAD,
)
from partita.analysis.modes import AMBIENT
from partita.analysis.modes import Mode as ModeOfNodes
from partita.errors import ModeError, OptionError
from partita.policies import ByMode
from partita.testing.generator.build import dump
from partita.treatments import Call, Mode


def regions(source: Program | Script, policy: ByMode | None = None) -> dict[str, str]:
    """The nodes of each region, by its name."""
    program = source.program() if isinstance(source, Script) else source
    found = (policy or ByMode())(program)
    return {region.name: " ".join(node.name for node in region.nodes) for region in found}


def blocks(x: Tensor) -> tuple[Tensor, ...]:
    one = x.sin()
    with torch.no_grad():
        two = one.cos()
        with torch.autocast("cpu", dtype=BRAIN):
            three = two @ two
    with torch.autocast("cpu", dtype=BRAIN):
        four = x @ x
    with torch.autocast("cpu", enabled=False):
        five = x @ x
    with torch.no_grad():
        six = five.tan()
    return one, two, three, four, five, six


def test_each_outermost_run_is_a_region_labelled_by_what_it_sets() -> None:
    partition = ByMode()(traced(blocks, square()))
    assert [(region.name, region.label, [node.name for node in region.nodes]) for region in partition] == [
        ("no_grad", "no_grad", ["cos", "matmul"]),
        ("autocast", "autocast on cpu bfloat16", ["matmul_1"]),
        ("no_autocast", "no autocast on cpu", ["matmul_2"]),
        ("no_grad_1", "no_grad", ["tan"]),
    ]
    assert {node.name: reason for node, reason in partition.reasons.items()} == {"sin": "it runs in the caller's modes"}


def test_a_plan_by_modes_is_a_table_and_explains_nodes() -> None:
    decided = plan(traced(blocks, square()), ByMode(), Mode())
    assert str(decided) == text(
        """
        region       nodes  in  out  bytes in  bytes out  flops  treatment                  label
        -----------  -----  --  ---  --------  ---------  -----  -------------------------  ------------------------
        no_grad      2      1   2    36        54         54     Mode(operators='partita')  no_grad
        autocast     1      1   1    36        18         54     Mode(operators='partita')  autocast on cpu bfloat16
        no_autocast  1      1   1    36        36         54     Mode(operators='partita')  no autocast on cpu
        no_grad_1    1      1   1    36        36         0      Mode(operators='partita')  no_grad
        excluded: 1 node: it runs in the caller's modes
        """
    )
    assert decided.explain("matmul") == text(
        """
        matmul: in region 'no_grad', treated by Mode(operators='partita'), labelled 'no_grad'
          it runs under no_grad, autocast on cpu bfloat16
        """
    )
    assert decided.explain("sin") == "sin: outside every region: it runs in the caller's modes"
    assert "it only switches a mode" in decided.explain("_set_grad_enabled")


def test_a_program_that_switches_nothing_has_no_region() -> None:
    program = traced(lambda x: x.sin() + 1, square())
    assert regions(program) == {}
    assert wrapped(program).caller == AMBIENT
    assert tree(wrapped(program)) == "sin\nadd"


def test_an_empty_graph_and_a_graph_of_nothing_but_toggles_have_no_region() -> None:
    empty = program_of_toggles(lambda graph, x: ())
    assert regions(empty) == {}
    assert wrapped(empty).module()(1) == ()

    def nothing_inside(graph: Graph, x: Node) -> Node:
        graph.call_function(SET_GRAD, (False,))
        block = graph.call_function(ENTER_AUTOCAST, ("cpu",))
        graph.call_function(EXIT_AUTOCAST, (block,))
        graph.call_function(SET_GRAD, (True,))
        return x

    program = program_of_toggles(nothing_inside)
    assert regions(program) == {}
    after = wrapped(program)
    assert tree(after) == ""
    x = torch.ones(2)
    assert after.module()(x) is x


def test_blocks_that_nobody_leaves_hold_to_the_end() -> None:
    for target, arguments, name in (
        (SET_GRAD, (False,), "no_grad"),
        (ENTER_AUTOCAST, ("cpu", BRAIN), "autocast"),
    ):
        script = Script()
        script.probe()
        script.toggle(target, *arguments)
        script.probe()
        assert regions(script) == {name: "probe_1 probe_2"}


def test_a_handle_of_inference_that_nobody_leaves_is_dropped_at_once() -> None:
    script = Script()
    script.toggle(ENTER_INFERENCE, True)
    assert regions(script) == {}


def test_a_block_belongs_to_the_run_that_it_was_entered_in() -> None:
    script = Script()
    script.toggle(SET_GRAD, False)
    block = script.toggle(ENTER_AUTOCAST, "cpu", BRAIN)
    script.toggle(SET_GRAD, True)
    script.toggle(EXIT_AUTOCAST, block)
    assert regions(script) == {"no_grad": "probe probe_1 probe_2"}

    script = Script()
    block = script.toggle(ENTER_AUTOCAST, "cpu", BRAIN)
    script.toggle(SET_GRAD, False)
    script.toggle(EXIT_AUTOCAST, block)
    script.toggle(SET_GRAD, True)
    assert regions(script) == {"autocast": "probe probe_1", "no_grad": "probe_2"}


def test_two_blocks_that_set_the_same_are_two_regions() -> None:
    script = Script()
    for _ in range(2):
        block = script.toggle(ENTER_AUTOCAST, "cpu", BRAIN)
        script.graph.call_function(EXIT_AUTOCAST, (block,))
    assert regions(script) == {"autocast": "probe", "autocast_1": "probe_1"}


def test_no_grad_blocks_in_a_row_are_one_region() -> None:
    script = Script()
    for _ in range(2):
        script.toggle(SET_GRAD, False)
        script.graph.call_function(SET_GRAD, (True,))
    assert regions(script) == {"no_grad": "probe probe_1"}


def test_toggles_that_change_nothing_make_no_region() -> None:
    script = Script()
    script.toggle(SET_GRAD, True)
    script.toggle(SET_GRAD, True)
    assert regions(script) == {}
    script = Script()
    outer = script.toggle(ENTER_AUTOCAST, "cpu", BRAIN, True, None)
    inner = script.toggle(ENTER_AUTOCAST, "cpu", None, True, None)
    script.toggle(EXIT_AUTOCAST, inner)
    script.toggle(EXIT_AUTOCAST, outer)
    assert regions(script) == {"autocast": "probe probe_1 probe_2"}
    assert tree(wrapped(script.program())) == text(
        """
        autocast on cpu bfloat16
            probe
            probe_1
            probe_2
        probe_3
        """
    )


def test_inference_blocks_hold_what_is_switched_inside() -> None:
    script = Script()
    script.toggle(SET_GRAD, False)
    outer = script.toggle(ENTER_INFERENCE, True)
    script.toggle(SET_GRAD, True)
    inner = script.toggle(ENTER_INFERENCE, False)
    script.toggle(EXIT_INFERENCE, inner)
    script.toggle(EXIT_INFERENCE, outer)
    script.toggle(SET_GRAD, True)
    assert tree(wrapped(script.program())) == text(
        """
        no_grad
            probe
            inference_mode
                probe_1
                enable_grad
                    probe_2
                    no inference_mode
                        probe_3
                    probe_4
            probe_5
        probe_6
        """
    )


def test_devices_are_settings_of_their_own() -> None:
    script = Script()
    cpu = script.toggle(ENTER_AUTOCAST, "cpu", BRAIN)
    cuda = script.toggle(ENTER_AUTOCAST, "cuda", HALF)
    script.toggle(EXIT_AUTOCAST, cpu)
    script.toggle(EXIT_AUTOCAST, cuda)
    assert tree(wrapped(script.program())) == text(
        """
        autocast on cpu bfloat16
            probe
            autocast on cuda float16
                probe_1
        autocast on cuda float16
            probe_2
        probe_3
        """
    )


def test_constants_are_taken_to_be_traced_with_gradients_on() -> None:
    program = traced(blocks, square())
    assert wrapped(program).caller == ModeOfNodes(grad=True)
    assert list(regions(program, ByMode(caller_grad=True))) == list(regions(program))


def test_blocks_that_end_without_gradients_were_traced_under_no_grad() -> None:
    script = Script()
    script.toggle(SET_GRAD, True)
    script.toggle(SET_GRAD, False)
    assert regions(script) == {"enable_grad": "probe", "no_grad": "probe_1"}
    assert wrapped(script.program()).caller == AMBIENT


def test_constants_in_an_inference_block_do_not_tell_the_mode_around_it() -> None:
    script = Script()
    script.toggle(SET_GRAD, False)
    script.toggle(SET_GRAD, True)
    block = script.toggle(ENTER_INFERENCE, True)
    script.toggle(SET_GRAD, False)
    script.toggle(SET_GRAD, False)
    script.toggle(EXIT_INFERENCE, block)
    assert wrapped(script.program()).caller == ModeOfNodes(grad=True)


@pytest.mark.parametrize("in_inference", [True, False])
def test_a_body_that_ends_by_switching_gradients_on_was_traced_with_them(in_inference: bool) -> None:
    inner = Script()
    inner.toggle(SET_GRAD, False)
    inner.toggle(SET_GRAD, True)
    outer = Script()
    outer.graph.call_function(hops.call, (outer.graph.get_attr("body"), outer.x))
    block = outer.toggle(ENTER_INFERENCE, True) if in_inference else None
    outer.toggle(SET_GRAD, False)
    outer.toggle(SET_GRAD, False)
    if block is not None:
        outer.toggle(EXIT_INFERENCE, block)
    outer.graph.output(tuple(outer.probes))
    root = nn.Module()
    root.body = inner.program().graph_module
    assert wrapped(Program.of(GraphModule(root, outer.graph))).caller == ModeOfNodes(grad=True)


def test_a_block_that_is_never_closed_was_traced_with_gradients_on() -> None:
    script = Script()
    script.toggle(SET_GRAD, False)
    script.toggle(SET_GRAD, True)
    script.toggle(SET_GRAD, False)
    assert regions(script) == {"no_grad": "probe", "no_grad_1": "probe_2"}


def test_nothing_is_assumed_of_a_program_that_puts_back_what_it_found() -> None:
    script = Script()
    found = script.graph.call_function(IS_GRAD_ENABLED)
    script.toggle(SET_GRAD, False)
    script.toggle(SET_GRAD, True)
    script.toggle(SET_GRAD, found)
    assert regions(script) == {"no_grad": "probe", "enable_grad": "probe_1"}
    assert wrapped(script.program()).caller == AMBIENT


def test_nothing_is_assumed_of_a_program_that_sets_no_grad_mode() -> None:
    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BRAIN):
            return x @ x

    assert wrapped(traced(cast, square())).caller == AMBIENT


def test_the_callers_grad_mode_can_be_told() -> None:
    script = Script()
    script.toggle(SET_GRAD, False)
    script.toggle(SET_GRAD, True)
    assert regions(script, ByMode(caller_grad=True)) == {"no_grad": "probe"}
    assert regions(script, ByMode(caller_grad=False)) == {"enable_grad": "probe_1"}
    assert regions(script, ByMode(caller_grad=None)) == {"no_grad": "probe", "enable_grad": "probe_1"}
    with pytest.raises(OptionError, match="caller_grad is True, False, None"):
        ByMode(caller_grad="on")  # type: ignore[arg-type]


def test_what_else_is_known_of_the_caller_stays_known() -> None:
    script = Script()
    script.toggle(SET_GRAD, False)
    program = script.program().under(ModeOfNodes(inference=False))
    assert ByMode(caller_grad=True)(program).program.caller == ModeOfNodes(grad=True, inference=False)


def test_an_operator_whose_branches_switch_modes_is_one_region() -> None:
    def with_grad(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.sin()
        return x * y

    def with_cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BRAIN):
            return (x @ x).float()

    def choose(x: Tensor, take: Tensor) -> Any:
        return torch.cond(take, with_grad, with_cast, (x,))

    partition = ByMode()(traced(choose, square(), torch.tensor(True)))
    assert [(region.name, region.label, len(region)) for region in partition] == [("cond", "modes inside", 1)]


@pytest.mark.parametrize(
    ("target", "argument", "named"),
    [
        (EXIT_AUTOCAST, "x", "'_exit_autocast' leaves 'x', which is not an open block"),
        (EXIT_INFERENCE, "x", "'_exit_inference_mode' leaves 'x', which is not an open block"),
        (ENTER_AUTOCAST, "abacus", "'_enter_autocast' enters autocast on 'abacus', which is no device type"),
        (SET_GRAD, "x", "'_set_grad_enabled' switches a mode by values"),
        (ENTER_INFERENCE, "x", "'_enter_inference_mode' switches a mode by values"),
    ],
)
def test_toggles_without_meaning_are_refused_by_name_and_nothing_changes(
    target: Any, argument: str, named: str
) -> None:
    def body(graph: Graph, x: Node) -> Node:
        graph.call_function(target, (x if argument == "x" else argument,))
        return graph.call_function(torch.neg, (x,))

    module = program_of_toggles(body).graph_module
    before = dump(module)
    with pytest.raises(ModeError, match=named):
        plan(module, ByMode(), Mode())
    assert dump(module) == before


@pytest.mark.parametrize(("enter", "leave"), [(ENTER_AUTOCAST, EXIT_AUTOCAST), (ENTER_INFERENCE, EXIT_INFERENCE)])
def test_a_block_left_twice_is_refused_by_name(enter: Any, leave: Any) -> None:
    script = Script()
    block = script.toggle(enter, "cpu" if enter is ENTER_AUTOCAST else True)
    script.toggle(leave, block)
    script.toggle(leave, block)
    with pytest.raises(ModeError, match=f"'{leave.__name__}_1' leaves '{enter.__name__}'.* is left twice"):
        plan(script.program(), ByMode(), Mode())


def test_a_partition_by_modes_can_be_called_as_well() -> None:
    program = traced(blocks, square())
    after = plan(program, ByMode(), Call()).apply()
    assert [node.target for node in after.graph.find_nodes(op="call_module")] == [*regions(program)]
    for name in regions(program):
        with torch.no_grad():
            after.module().get_submodule(name)(square())
            assert not torch.is_grad_enabled()
