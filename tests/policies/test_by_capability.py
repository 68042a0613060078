"""ByCapability: who takes what, the fewest regions, their limits, and a reason for every node left out."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from tests.helpers.core import program_of
from tests.policies.helpers import parts
from torch import nn
from torch.fx import Graph, Node
from torch.fx.passes.operator_support import OperatorSupport

import partita
from partita import Partition, Program, Region, Tolerance
from partita.equivalence import compare
from partita.errors import CallbackError, CycleError, OptionError
from partita.policies import ByCapability
from partita.program.program import summation_tolerance
from partita.regions.region import Reason
from partita.testing.generator.draft import Case
from partita.testing.strategies import programs
from partita.treatments import Call


def refuses(*names: str) -> object:
    """A refusal function by what a node calls."""

    def refusal(node: Node) -> str | None:
        called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return f"no {called}" if called in names else None

    return refusal


def sandwich(x: torch.Tensor) -> torch.Tensor:
    return (x.sin().cos() + x.exp()).tan()


def two_arms(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin().cos(), x.exp().tan()


def test_what_is_taken_forms_the_fewest_regions() -> None:
    partition = ByCapability(refuses("cos"))(program_of(sandwich))
    assert parts(partition) == [["sin"], ["exp", "add", "tan"]]
    assert [region.label for region in partition] == ["refusal", "refusal"]


def test_a_refused_node_has_its_reason_as_words_and_as_data() -> None:
    program = program_of(sandwich)
    reason = ByCapability(refuses("cos"))(program).reasons[program.node("cos")]
    assert reason == "refused by refusal: no cos"
    assert isinstance(reason, Reason)
    assert (reason.kind, reason.by, reason.why) == ("refused", "refusal", "no cos")


def test_everything_refused_and_nothing_to_take_are_partitions_without_regions() -> None:
    assert len(ByCapability(lambda node: "never")(program_of(sandwich))) == 0
    assert len(ByCapability(lambda node: None)(program_of(lambda x: x))) == 0


class Support(OperatorSupport):
    """Says yes to all but sines, inputs and the output included."""

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool:
        return node.target != "sin"


def test_an_operator_support_of_torch_is_asked() -> None:
    program = program_of(sandwich)
    partition = ByCapability(Support())(program)
    assert parts(partition) == [["cos", "exp", "add", "tan"]]
    assert partition.reasons[program.node("sin")] == "refused by Support: not supported"


def test_several_takers_share_the_nodes_by_preference() -> None:
    def first(node: Node) -> str | None:
        return None if node.target in ("sin", "cos") else "not mine"

    def second(node: Node) -> str | None:
        return "too hard" if node.target == "tan" else None

    program = program_of(sandwich)
    partition = ByCapability((first, second))(program)
    assert [(region.label, [node.name for node in region.nodes]) for region in partition] == [
        ("first", ["sin", "cos"]),
        ("second", ["exp", "add"]),
    ]
    reason = partition.reasons[program.node("tan")]
    assert reason == "refused by first: not mine; second: too hard"
    assert isinstance(reason, Reason)
    assert reason.by == "first and second"


def test_connected_regions_hold_nothing_that_data_does_not_connect() -> None:
    program = program_of(two_arms)
    assert parts(ByCapability(lambda node: None)(program)) == [["sin", "cos", "exp", "tan"]]
    assert parts(ByCapability(lambda node: None, connected=True)(program)) == [["sin", "cos"], ["exp", "tan"]]


def test_small_regions_are_left_out_and_large_ones_cut() -> None:
    program = program_of(sandwich)
    small = ByCapability(refuses("cos"), min_size=2)(program)
    assert parts(small) == [["exp", "add", "tan"]]
    assert small.reasons[program.node("sin")] == "its region 'refusal_0' is too small: 1 of at least 2 operators"
    assert parts(ByCapability(lambda node: None, max_size=2)(program)) == [["sin", "cos"], ["exp", "add"], ["tan"]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.sum().exp()
        return (x @ self.weight).sin() * scale


def test_regions_without_enough_flops_are_left_out() -> None:
    program = partita.capture(Net(), (torch.ones(2, 4),))
    few = ByCapability(refuses("sin.default"), min_flops=64, modes_apart=False)(program)
    assert [[node.name for node in region.nodes if "matmul" in node.name] for region in few] == [["matmul"]]
    assert any("of at least 64 FLOPs" in reason for reason in few.reasons.values())
    assert len(ByCapability(lambda node: None, min_flops=65, modes_apart=False)(program)) == 0


def test_a_region_holds_one_mode_unless_asked() -> None:
    program = partita.capture(Net(), (torch.ones(2, 4),))
    apart = ByCapability(lambda node: None)(program)
    assert len(apart) == 2
    for region in apart:
        assert len({program.modes.at(program.index.number[node]) for node in region.nodes}) == 1
    assert len(ByCapability(lambda node: None, modes_apart=False)(program)) == 1


def test_groups_stay_together_or_are_refused_together() -> None:
    program = program_of(sandwich)
    partition = ByCapability(refuses("cos"), together=[["exp", "cos"]])(program)
    assert parts(partition) == [["sin"], ["add", "tan"]]
    assert partition.reasons[program.node("exp")] == "it stays together with 'cos', which is refused by refusal: no cos"
    kept = ByCapability(refuses("cos"), together=lambda node: "ends" if node.name in ("exp", "sin") else None)(program)
    assert parts(kept) == [["sin", "exp"], ["add", "tan"]]


def test_a_group_goes_to_the_first_that_takes_all_of_it() -> None:
    def first(node: Node) -> str | None:
        return None if node.target == "sin" else "not mine"

    def second(node: Node) -> str | None:
        return None

    (only,) = ByCapability((first, second), together=[["sin", "cos"]])(program_of(sandwich))
    assert only.label == "second"


def test_a_group_around_what_must_run_between_is_an_error_that_names_it() -> None:
    with pytest.raises(CycleError, match="'sin'"):
        ByCapability(refuses("cos"), together=[["sin", "add"]])(program_of(sandwich))


def test_regions_that_are_not_worthwhile_say_why() -> None:
    program = program_of(sandwich)

    def worthwhile(region: Region) -> bool | str:
        return len(region) > 1 or "a single node"

    partition = ByCapability(refuses("cos"), worthwhile=worthwhile)(program)
    assert parts(partition) == [["exp", "add", "tan"]]
    assert partition.reasons[program.node("sin")] == "its region 'refusal_0' is not worthwhile: a single node"


def test_a_region_that_is_thinned_out_is_made_legal_again() -> None:
    """Without its middle a region cannot be called at once."""
    chain = program_of(lambda x: x.sin().cos().exp())
    keep_ends = ByCapability(lambda node: None, worthwhile=lambda region: [region.nodes[0], region.nodes[-1]])
    assert parts(keep_ends(chain)) == [["sin"], ["exp"]]


def test_devices_are_kept_apart_when_asked() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    near = graph.call_function(torch.sin, (x,))
    far = graph.call_function(torch.cos, (x,))
    graph.output((near, far))
    x.meta["val"] = near.meta["val"] = torch.ones(2)
    far.meta["val"] = torch.ones(2, device="meta")
    program = program_of(graph)
    assert len(ByCapability(lambda node: None)(program)) == 1
    assert parts(ByCapability(lambda node: None, devices_apart=True)(program)) == [["sin"], ["cos"]]


def test_a_read_stays_before_a_refused_write() -> None:
    def read_write_read(x: torch.Tensor) -> torch.Tensor:
        before = x.sin()
        x.add_(1)
        return before + x.cos()

    assert parts(ByCapability(refuses("add_"))(program_of(read_write_read))) == [["sin"], ["cos", "add"]]


def test_slicing_that_is_refused_stays_outside_and_items_of_containers_follow_it() -> None:
    def sliced(x: torch.Tensor) -> torch.Tensor:
        first, second = x.split(2)
        return first.sin() + second[0]

    program = program_of(sliced)
    partition = ByCapability(lambda node: "no slices" if node.target is operator.getitem else None)(program)
    outside = [node.name for node in program.operators() if partition.region_of(node) is None]
    assert "getitem_2" in outside
    assert all(partition.region_of(program.node(name)) is not None for name in ("getitem", "getitem_1"))


def test_an_index_that_is_computed_is_not_pulled_before_itself() -> None:
    def picked(x: torch.Tensor, xs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return xs[3] if False else x.sin()[x.argmax()]

    partition = ByCapability(refuses("argmax"))(program_of(picked))
    assert parts(partition) == [["sin", "getitem"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capabilities": 3}, "is no capability"),
        ({"capabilities": ()}, "at least one"),
        ({"capabilities": "inductr"}, "'inductor'"),
        ({"capabilities": OperatorSupport}, "is no capability"),
        ({"min_size": 0}, "min_size is a number from 1 on"),
        ({"max_size": True}, "max_size is a number from 1 on"),
        ({"min_size": 3, "max_size": 2}, "at least 3 and at most 2"),
        ({"connected": 1}, "connected is True or False"),
        ({"worthwhile": 1}, "function of a region"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ByCapability(**{"capabilities": refuses("cos"), **options})  # type: ignore[arg-type]


def test_a_predicate_in_place_of_a_refusal_function_is_told_apart() -> None:
    with pytest.raises(CallbackError, match=r"returned True for node 'sin'; return the reason"):
        ByCapability(lambda node: True)(program_of(sandwich))  # type: ignore[arg-type,return-value]


def test_a_refusal_function_that_raises_is_named_with_the_node() -> None:
    def broken(node: Node) -> str | None:
        raise KeyError("oops")

    with pytest.raises(CallbackError, match="'broken' raised KeyError for node 'sin'"):
        ByCapability(broken)(program_of(sandwich))


def test_a_plan_sums_up_what_is_left_out() -> None:
    made = partita.plan(program_of(sandwich), ByCapability(refuses("cos", "tan"), min_size=2), Call())
    assert made.summary() == (
        "2 nodes in 1 region, 3 outside\n"
        "1 node not worthwhile: 1 of at least 2 operators: sin 1\n"
        "1 node refused by refusal: no cos: cos 1\n"
        "1 node refused by refusal: no tan: tan 1"
    )
    assert [(group.kind, group.count) for group in made.excluded()] == [
        ("not worthwhile", 1),
        ("refused", 1),
        ("refused", 1),
    ]


def test_a_plan_explains_by_which_path_regions_are_apart() -> None:
    made = partita.plan(program_of(sandwich), ByCapability(refuses("cos")), Call())
    assert "cut from what is before by sin -> cos -> add" in made.explain("add")
    assert made.explanation("sin").path_out == ("sin", "cos", "add")
    assert made.explanation("cos").reason == "refused by refusal: no cos"


@given(programs(max_nodes=24))
def test_what_is_cut_by_capability_means_the_same(case: Case) -> None:
    program = Program.of(case.graph_module)

    def refusal(node: Node) -> str | None:
        return "every third" if program.index.number[node] % 3 == 0 else None

    partition = ByCapability(refusal)(program)
    _assert_complete(program, partition)
    after = partita.plan(program, partition, Call()).apply()
    tolerance: Tolerance = after.tolerance | summation_tolerance(program)
    found = compare(program, after, case.copy().args, case.copy().kwargs, tolerance=tolerance)
    assert not found.differences, str(found)


def _assert_complete(program: Program, partition: Partition) -> None:
    """Every operator is in a region or has a reason."""
    for node in program.operators():
        number = program.index.number[node]
        settled = number in program.projections or number in program.modes.toggles
        assert settled or partition.region_of(node) is not None or node in partition.reasons, node
