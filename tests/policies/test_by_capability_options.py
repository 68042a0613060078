"""Options of ByCapability hold together: groups, sizes, connectedness, what is worthwhile, and what is kept apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.core import program_of
from tests.helpers.work import calls_during
from tests.policies.helpers import parts
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

import partita
from partita import Partition, Program, Region
from partita.errors import CallbackError, CycleError, OptionError
from partita.policies import ByCapability
from partita.policies.legalize import assignable
from partita.regions.region import Reason
from partita.testing.generator.draft import Case
from partita.testing.strategies import programs
from partita.treatments import Call


def takes_all(node: Node) -> None:
    return None


def two_chains(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a, p = x.sin(), y.sin()
    b, q = a.cos(), p.cos()
    return b.exp(), q.exp()


def joined_chains(x: Tensor, y: Tensor) -> Tensor:
    a, p = x.sin(), y.sin()
    b, q = a.cos(), p.cos()
    return b.add(q).exp()


def without(*names: str) -> Callable[[Region], list[Node]]:
    return lambda region: [node for node in region.nodes if node.name not in names]


def test_large_regions_are_cut_between_groups() -> None:
    found = parts(ByCapability(takes_all, together=[["sin", "cos_1"]], max_size=2)(program_of(two_chains)))
    assert ["sin", "cos_1"] in found
    assert max(map(len, found)) == 2


def test_a_group_larger_than_the_largest_region_is_an_error_that_names_it() -> None:
    crowded = ByCapability(takes_all, together=[["cos", "exp", "exp_1"]], max_size=2)
    with pytest.raises(OptionError, match=r"group of 3 operators, which begins at 'cos', but `max_size` is 2"):
        crowded(program_of(two_chains))


def test_large_connected_regions_are_cut_into_connected_ones() -> None:
    found = ByCapability(takes_all, connected=True, max_size=2)(program_of(joined_chains))
    assert parts(found) == [["sin", "cos"], ["sin_1", "cos_1"], ["add", "exp"]]


def test_connected_regions_stay_connected_when_nodes_are_taken_out() -> None:
    found = ByCapability(takes_all, connected=True, worthwhile=without("add"))(program_of(joined_chains))
    assert parts(found) == [["sin", "cos"], ["sin_1", "cos_1"], ["exp"]]


def test_what_is_too_small_after_nodes_are_taken_out_is_left_out() -> None:
    program = program_of(joined_chains)
    found = ByCapability(takes_all, min_size=3, worthwhile=without("add"))(program)
    assert parts(found) == [["sin", "sin_1", "cos", "cos_1"]]
    assert "is too small: 1 of at least 3 operators" in found.reasons[program.node("exp")]


def test_worthwhile_is_asked_about_the_regions_that_come_of_its_answers() -> None:
    asked: list[list[str]] = []

    def worthwhile(region: Region) -> Iterable[Node] | str:
        asked.append([node.name for node in region.nodes])
        return without("add")(region) if len(region) > 1 else "alone"

    program = program_of(joined_chains)
    found = ByCapability(takes_all, worthwhile=worthwhile)(program)  # type: ignore[arg-type]
    assert asked == [["sin", "sin_1", "cos", "cos_1", "add", "exp"], ["sin", "sin_1", "cos", "cos_1"], ["exp"]]
    assert parts(found) == [["sin", "sin_1", "cos", "cos_1"]]
    assert found.reasons[program.node("exp")] == "its region 'takes_all_0_1' is not worthwhile: alone"


def test_a_region_that_is_just_what_worthwhile_asked_for_is_not_asked_about_again() -> None:
    asked: list[int] = []

    def all_but_the_last(region: Region) -> Iterable[Node]:
        asked.append(len(region))
        return region.nodes[:-1]

    chain = program_of(lambda x: x.sin().cos().exp())
    assert parts(ByCapability(takes_all, worthwhile=all_but_the_last)(chain)) == [["sin", "cos"]]  # type: ignore[arg-type]
    assert asked == [3]


def test_a_group_of_which_worthwhile_keeps_a_part_is_left_out_whole() -> None:
    program = program_of(two_chains)
    found = ByCapability(takes_all, together=[["cos", "cos_1"]], worthwhile=without("cos"))(program)
    assert parts(found) == [["sin", "sin_1"], ["exp", "exp_1"]]
    reason = found.reasons[program.node("cos_1")]
    assert reason == "it stays together with 'cos', which `worthwhile` excludes"
    assert isinstance(reason, Reason)
    assert (reason.kind, reason.by) == ("together", "cos")


def test_a_group_stays_whole_where_its_region_is_cut() -> None:
    """Without `exp`, the sine could run at once and the cosine only later."""
    program = program_of(lambda x, y: y.sin() + (x.tan().exp() * 2).cos())
    found = ByCapability(takes_all, together=[["sin", "cos"]], worthwhile=without("exp"))(program)
    assert parts(found) == [["tan"], ["sin", "mul", "cos", "add"]]


class HalfWithoutGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        one = x.sin()
        with torch.no_grad():
            other = x.cos()
        return one + other


def test_a_group_of_several_modes_is_refused_in_words() -> None:
    program = partita.capture(HalfWithoutGradients(), (torch.randn(3, requires_grad=True),))
    with pytest.raises(OptionError, match=r"'sin' .* and 'cos' \(no_grad\) into one group.* use modes_apart=False"):
        ByCapability(takes_all, together=[["sin", "cos"]])(program)
    assert len(ByCapability(takes_all, together=[["sin", "cos"]], modes_apart=False)(program)) == 1


def test_a_group_of_several_devices_is_refused_in_words() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    near, far = graph.call_function(torch.sin, (x,)), graph.call_function(torch.cos, (x,))
    unknown = graph.call_function(torch.tan, (near,))
    graph.output((near, far, unknown))
    x.meta["val"] = near.meta["val"] = torch.ones(2)
    far.meta["val"] = torch.ones(2, device="meta")
    program = program_of(graph)
    with pytest.raises(
        OptionError, match=r"'sin' \(cpu\) and 'cos' \(meta\) into one group, but a region holds one device"
    ):
        ByCapability(takes_all, together=[["sin", "cos"]], devices_apart=True)(program)
    found = ByCapability(takes_all, together=[["sin", "tan"]], devices_apart=True)(program)
    assert parts(found) == [["sin", "tan"], ["cos"]]


def test_nodes_with_different_answers_are_kept_apart() -> None:
    program = program_of(two_chains)
    found = ByCapability(takes_all, apart=lambda node: node.name.endswith("_1"))(program)
    assert parts(found) == [["sin", "cos", "exp"], ["sin_1", "cos_1", "exp_1"]]
    with pytest.raises(OptionError, match=r"'sin' \(sin\) and 'cos' \(cos\) into one group.* one result of `apart`"):
        ByCapability(takes_all, apart=lambda node: node.name, together=[["sin", "cos"]])(program)


@pytest.mark.parametrize("option", ["apart", "together"])
def test_answers_by_which_nodes_cannot_be_told_apart_are_named_with_the_node(option: str) -> None:
    options: dict[str, Any] = {option: lambda node: [node.name]}
    with pytest.raises(CallbackError, match=rf"`{option}` returned \['sin'\] for node 'sin'"):
        ByCapability(takes_all, **options)(program_of(two_chains))


def test_what_keeps_nodes_apart_is_a_function() -> None:
    with pytest.raises(OptionError, match="`apart` is a function"):
        ByCapability(takes_all, apart=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("together", [3, "sin", [3], ["sin"], [[3]], [["sin", None]]])
def test_what_stays_together_are_groups_of_names(together: Any) -> None:
    with pytest.raises(OptionError, match="`together` takes"):
        ByCapability(takes_all, together=together)


def ranked(x: Tensor) -> Tensor:
    with torch.no_grad():
        values, places = torch.topk(x, 2)
    return values.sin() + places


@pytest.mark.parametrize(
    ("name", "what"),
    [("x", "an input"), ("output", "the output"), ("_set_grad_enabled", "only switches a mode")],
)
def test_a_name_that_no_region_can_hold_does_not_stay_together_with_anything(name: str, what: str) -> None:
    policy = ByCapability(takes_all, together=[[name, "sin"]])
    with pytest.raises(OptionError, match=f"`together` names '{name}', which no region can hold: it (is )?{what}"):
        policy(capture(ranked))


def capture(function: Callable[..., Any]) -> Program:
    return partita.capture(function, (torch.linspace(-1, 1, 4),))


def test_an_item_stays_together_as_what_makes_its_container() -> None:
    def function(x: Tensor) -> Tensor:
        values, places = torch.topk(x, 2)
        return values.sin() + places

    program = program_of(function)
    assert parts(ByCapability(takes_all, together=[["getitem", "sin"]], max_size=2)(program))[0][0] == "topk"
    refuses = ByCapability(lambda node: "no" if node.name == "sin" else None, together=[["getitem_1", "sin"]])
    reasons = {node.name: reason for node, reason in refuses(program).reasons.items()}
    assert reasons["topk"] == "it stays together with 'sin', which is refused by capability: no"


def test_an_empty_reason_is_none() -> None:
    program = program_of(two_chains)
    refused = partita.plan(program, ByCapability(lambda node: "" if node.name == "sin" else None), Call())
    assert "1 node refused by capability: no reason given: sin 1" in refused.summary()
    left = partita.plan(program, ByCapability(takes_all, worthwhile=lambda region: ""), Call())
    assert "is not worthwhile: no reason given" in left.explain("sin")
    assert "6 nodes not worthwhile: no reason given: " in left.summary()


def test_all_that_tells_what_is_left_out_counts_the_same() -> None:
    made = partita.plan(capture(ranked), ByCapability(lambda node: "no" if "topk" in node.name else None), Call())
    switches = [node for node in made.program.graph.nodes if "grad_enabled" in node.name]
    assert "only switches" not in str(made)
    assert made.summary().startswith("2 nodes in 1 region, 1 outside")
    assert "excluded: 1 node: refused by capability: no" in str(made), "items go with what makes them"
    assert sum(group.count for group in made.excluded()) == 1
    assert made.explain(switches[0].name).count("it only switches a mode") == 1


class Selecting(nn.Module):
    """A size that only data decides, read by a region that needs the region that needs the size."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        early = x.tanh()
        late = x[x > 1].sin().exp()
        return early, late.cos(), torch.zeros(late.size(0))


def by_group(**options: Any) -> Partition:
    module = torch.export.export(Selecting(), (torch.tensor([1.0, 2.0, 3.0]),)).module()
    assert isinstance(module, GraphModule)
    groups = {"tanh": "a", "exp": "a", "gt": "b", "index": "b", "sin": "b", "sym_size_int_1": "c", "cos": "c"}
    apart = ByCapability(
        lambda node: None if node.name in groups else "of no group", apart=lambda node: groups[node.name], **options
    )
    return apart(Program.of(module))


def test_regions_that_need_each_other_for_a_size_are_cut_by_size_and_limits_hold() -> None:
    assert parts(by_group()) == [["gt", "index", "sin"], ["sym_size_int_1"], ["tanh", "exp"], ["cos"]]
    assert parts(by_group(min_size=2)) == [["gt", "index", "sin"], ["tanh", "exp"]]
    with pytest.raises(CycleError, match="groups that begin at 'sym_size_int_1'"):
        by_group(together=[["sym_size_int_1", "cos"]])


def test_an_answer_with_nodes_is_about_as_much_work_as_a_yes() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    for _ in range(6_000):
        x = graph.call_function(torch.sin, (x,))
    graph.output(x)
    program = program_of(graph)
    plain = calls_during(ByCapability(takes_all, worthwhile=lambda region: True), program)
    chosen = calls_during(ByCapability(takes_all, worthwhile=lambda region: region.nodes[:-1]), program)
    assert chosen < 4 * plain


@st.composite
def options(draw: st.DrawFn, program: Program) -> dict[str, Any]:
    """Options for a program, with groups of its nodes and an answer for each of them."""
    names = [program.index.nodes[number].name for number in assignable(program)]
    chosen = draw(st.lists(st.sampled_from(names), max_size=4, unique=True)) if names else []
    unwanted = draw(st.sets(st.sampled_from(names), max_size=4)) if names else set()
    return {
        "connected": draw(st.booleans()),
        "max_size": draw(st.none() | st.integers(4, 6)),
        "min_size": draw(st.integers(1, 3)),
        "together": [group for group in (chosen[:2], chosen[2:]) if group],
        "worthwhile": without(*unwanted) if draw(st.booleans()) else None,
    }


@given(programs(max_nodes=24), st.data())
def test_all_options_hold_for_every_region(case: Case, data: st.DataObject) -> None:
    program = Program.of(case.graph_module)
    chosen = data.draw(options(program))
    cut = ByCapability(lambda node: "odd" if program.index.number[node] % 7 == 3 else None, modes_apart=False, **chosen)
    try:
        partition = cut(program)
    except CycleError:
        return  # A group is around something that must run between its nodes.
    items = {program.index.nodes[number] for number in program.projections}
    for region in partition:
        operators = [node for node in region.nodes if node not in items]
        assert chosen["min_size"] <= len(operators) <= (chosen["max_size"] or len(operators))
        assert not chosen["connected"] or is_connected(region, chosen["together"])
        if chosen["worthwhile"] is not None:
            assert set(chosen["worthwhile"](region)) >= set(operators)
    for group in chosen["together"]:
        assert len({id(partition.region_of(program.node(name))) for name in group}) == 1


def is_connected(region: Region, together: list[list[str]]) -> bool:
    inside, found, waiting = set(region.nodes), set[Node](), [region.nodes[0]]
    by_name = {node.name: node for node in region.nodes}
    while waiting:
        node = waiting.pop()
        found.add(node)
        grouped = [by_name[name] for group in together if node.name in group for name in group]
        near = {*node.all_input_nodes, *node.users, *grouped}
        waiting += [other for other in near if other in inside and other not in found]
    return found == inside
