"""Policies that cut in graph order, what all policies have in common, and what they refuse."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from tests.helpers.work import calls_during
from tests.policies.helpers import dynamo, exported, parts, program_of
from torch import nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace

import partita
from partita import Partition, Program, policies
from partita.errors import CallbackError, OptionError
from partita.policies import AroundOperators, ByAnnotation, ByLabel, ByModule, BySize, SplitAt
from partita.testing import Case, programs
from partita.treatments import Call


def chain_of(count: int) -> Program:
    def write(graph: Graph) -> Node:
        value = graph.placeholder("x")
        for _ in range(count):
            value = graph.call_function(torch.sin, (value,))
        return value

    return program_of(write)


# SplitAt ------------------------------------------------------------------------------------------------------


def test_sequential_opens_a_region_at_each_marked_node() -> None:
    partition = SplitAt(lambda node: node.name in ("sin_2", "sin_3"))(chain_of(5))
    assert parts(partition) == [["sin", "sin_1"], ["sin_2"], ["sin_3", "sin_4"]]
    assert [region.name for region in partition] == ["part_0", "part_1", "part_2"]


def test_the_former_name_of_split_at_warns_and_hides_nothing_by_a_star_import() -> None:
    with pytest.warns(DeprecationWarning, match="SplitAt"):
        assert policies.Sequential is SplitAt
    assert "Sequential" not in policies.__all__
    with pytest.raises(AttributeError, match="Parallel"):
        _ = policies.Parallel


def test_sequential_makes_no_empty_region_before_a_marked_first_node() -> None:
    assert parts(SplitAt(lambda node: node.name == "sin")(chain_of(2))) == [["sin", "sin_1"]]


def test_sequential_asks_once_per_operator_in_graph_order() -> None:
    asked: list[str] = []
    SplitAt(lambda node: asked.append(node.name))(chain_of(3))
    assert asked == ["sin", "sin_1", "sin_2"]


def test_a_marked_mode_toggle_cuts_and_belongs_to_no_region() -> None:
    def write(graph: Graph) -> Node:
        x = graph.call_function(torch.sin, (graph.placeholder("x"),))
        graph.call_function(torch._C._set_grad_enabled, (False,))
        x = graph.call_function(torch.cos, (x,))
        graph.call_function(torch._C._set_grad_enabled, (True,))
        return graph.call_function(torch.exp, (x,))

    partition = SplitAt(lambda node: node.target is torch._C._set_grad_enabled)(program_of(write))
    assert parts(partition) == [["sin"], ["cos"], ["exp"]]
    assert set(partition.reasons.values()) == {"it only switches a mode"}


def test_items_of_containers_follow_the_container() -> None:
    def write(graph: Graph) -> Node:
        pieces = graph.call_function(torch.chunk, (graph.placeholder("x"), 2))
        first, second = (graph.call_function(operator.getitem, (pieces, at)) for at in (0, 1))
        return graph.call_function(torch.add, (first, second))

    assert parts(SplitAt(lambda node: True)(program_of(write))) == [["chunk", "getitem", "getitem_1"], ["add"]]


# BySize ----------------------------------------------------------------------------------------------------------


def test_by_size_cuts_after_so_many_operators() -> None:
    assert list(map(len, BySize(operators=2)(chain_of(5)))) == [2, 2, 1]


@pytest.mark.parametrize(("count", "wanted", "lengths"), [(7, 3, [3, 2, 2]), (2, 5, [1, 1]), (0, 3, [])])
def test_by_size_makes_so_many_parts_of_equal_length(count: int, wanted: int, lengths: list[int]) -> None:
    assert list(map(len, BySize(parts=wanted)(chain_of(count)))) == lengths


class Tied(nn.Module):
    """Linear layers of 64 bytes each; the third has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


CAPTURES = pytest.mark.parametrize("capture", [symbolic_trace, exported, dynamo])


@CAPTURES
def test_by_size_counts_tied_parameters_once(capture: Callable[[nn.Module], GraphModule]) -> None:
    partition = BySize(parameter_bytes=128)(Program.of(capture(Tied())))
    assert list(map(len, partition)) == [6, 2]


@CAPTURES
def test_an_operator_above_the_limit_opens_its_own_region(capture: Callable[[nn.Module], GraphModule]) -> None:
    partition = BySize(parameter_bytes=1)(Program.of(capture(Tied())))
    assert list(map(len, partition)) == [2, 4, 2]


# ByLabel ---------------------------------------------------------------------------------------------------------


def test_a_label_that_only_items_of_a_container_have_is_no_region() -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = x.split(2)
            return first.sin() + second.cos()

    x = torch.randn(4, 3)
    names = {"split": "before", "getitem": "items", "getitem_1": "items"}
    for program in (partita.capture(Halves(), (x,)), Program.of(symbolic_trace(Halves()))):
        plan = partita.plan(program, ByLabel(lambda node: names.get(node.name, "after")), Call())
        after = plan.apply()
        assert [region.name for region in plan.partition] == ["before", "after"]
        assert plan.explain("getitem").startswith("getitem: in region 'before'")
        assert {name for name, _ in after.module().named_children()} >= {"before", "after"}
        assert not hasattr(after.module(), "items")
        partita.verify(program, after, (x,))


# All of them -----------------------------------------------------------------------------------------------------

POLICIES = (
    SplitAt(lambda node: len(node.name) % 3 == 0),
    BySize(operators=3),
    BySize(parts=3),
    BySize(parameter_bytes=64),
    AroundOperators((torch.add, torch.mul, operator.add, "relu", nn.Linear, "sin"), allow_empty=True),
    AroundOperators(("aten.add", "aten.cos"), alone=False, min_size=2, allow_empty=True),
    ByAnnotation("group", allow_empty=True),
    ByModule("part.*", allow_empty=True),
)


def _annotated(case: Case) -> Program:
    """The case with annotations and module stacks that run across one another."""
    program = Program.of(case.graph_module)
    for at, node in enumerate(program.operators()):
        if at % 4:
            node.meta["custom"] = {"group": at // 2 % 3}
            node.meta["nn_module_stack"] = {str(at % 3): (f"part.{at % 3}", nn.Linear)}
    return program


@settings(max_examples=12)
@given(programs(max_nodes=20))
def test_every_policy_is_legal_accounts_for_every_operator_and_changes_nothing(case: Case) -> None:
    program = _annotated(case)
    for policy in POLICIES:
        partition = policy(program)
        inside = [node for region in partition for node in region.nodes]
        assert {*inside} | {*partition.reasons} == {*program.operators()}
        assert {*inside}.isdisjoint(partition.reasons)
        assert all(partition.region_of(node) is region for region in partition for node in region.nodes)
        after = partita.plan(program, partition, Call()).apply()
        partita.verify(program, after, case.args, case.kwargs, second_call=False, no_grad_call=False)


def test_guards_of_an_exported_program_stay_outside() -> None:
    program = Program.of(exported(Tied()))
    partition = BySize(parts=1)(program)
    assert {node.name: reason for node, reason in partition.reasons.items()} == {
        "_guards_fn": "it checks the inputs of the program"
    }


def test_policies_are_equal_by_what_they_say() -> None:
    assert ByModule("layers.*") == ByModule(("layers.*",))
    assert hash(AroundOperators("aten.mm")) == hash(AroundOperators(("aten.mm",)))
    assert BySize(parts=2) != BySize(parts=3)


@pytest.mark.parametrize(
    "policy",
    [ByLabel(lambda node: 1 / 0), SplitAt(lambda node: 1 / 0), ByModule(lambda path: 1 / 0)],
)
def test_a_function_that_raises_is_reported_with_the_node(policy: Callable[[Program], Partition]) -> None:
    program = Program.of(symbolic_trace(Tied()))
    with pytest.raises(CallbackError, match="ZeroDivisionError for node 'layers_0'"):
        policy(program)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ByLabel("stage"),  # type: ignore[arg-type]
        lambda: SplitAt(None),  # type: ignore[arg-type]
        lambda: BySize(),
        lambda: BySize(operators=2, parts=2),
        lambda: BySize(operators=0),
        lambda: BySize(parameter_bytes=1.5),  # type: ignore[arg-type]
        lambda: BySize(parts=True),
        lambda: AroundOperators(()),
        lambda: AroundOperators(3),  # type: ignore[arg-type]
        lambda: AroundOperators(torch.add, min_size=0),
        lambda: AroundOperators(torch.add, alone="yes"),  # type: ignore[arg-type]
        lambda: ByModule(),
        lambda: ByModule(""),
        lambda: ByModule((1,)),  # type: ignore[arg-type]
        lambda: ByModule(depth=0),
        lambda: ByModule(classes=3),  # type: ignore[arg-type]
        lambda: ByAnnotation(""),
    ],
)
def test_options_are_checked_on_construction(wrong: Callable[[], object]) -> None:
    with pytest.raises(OptionError):
        wrong()


@pytest.mark.parametrize(
    "policy",
    [
        AroundOperators(torch.mul),
        ByAnnotation("group"),
        ByModule("layers.*"),
        BySize(operators=50),
        SplitAt(lambda node: node.target is torch.mul),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_cost_grows_with_the_graph_and_no_faster(
    policy: Callable[[Program], Partition], small_and_large: tuple[Program, Program]
) -> None:
    small, large = (calls_during(policy, program) for program in small_and_large)
    assert large < 12 * small  # Eight times the nodes; the square would be sixty-four times the calls.


@pytest.fixture(scope="module")
def small_and_large() -> tuple[Program, Program]:
    return _long_program(1_500), _long_program(12_000)


def _long_program(count: int) -> Program:
    def write(graph: Graph) -> Node:
        value = before = graph.placeholder("x")
        for at in range(count // 5):
            added = graph.call_function(torch.add, (value, before))
            view = graph.call_method("view", (added, -1))
            before, value = value, graph.call_function(torch.mul, (view, view))
            value = graph.call_method("view", (value, graph.call_method("size", (value, 0))))
            for node in (added, view):
                node.meta["custom"] = {"group": at % 5}
                node.meta["nn_module_stack"] = {f"layers.{at // 100}": (f"layers.{at // 100}", nn.Linear)}
        return value

    program = program_of(write)
    # These are computed when first asked for, and no policy's work.
    assert not program.effects.barriers
    assert not program.modes.toggles
    return program
