"""Plans: what they print and explain, who treats which region, and that applying one leaves everything as it was."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.helpers.core import cut, listing, program_of, text
from tests.helpers.work import calls_during
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from partita import Plan, Program, Region, Tolerance, Treatment, capture, fingerprint, plan, verify
from partita._torch.operator_schemas import WRAP_WITH_AUTOCAST
from partita._torch.toggles import SET_GRAD, TOGGLES
from partita.errors import CallbackError, ModeError, OptionError, PartitaError, UnknownNodeError
from partita.policies import AroundOperators, ByLabel, BySize
from partita.testing.generator.build import dump
from partita.treatments import Call, Mark


@dataclass(frozen=True)
class Rough:
    """Calls the body, takes one mode, and says that it may round."""

    relative: float = 0.0
    absolute: float = 0.0
    gives: object = "body"
    allows_mixed_modes: bool = False

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(self.relative, self.absolute)

    def treat(self, body: GraphModule) -> Any:
        return body if self.gives == "body" else self.gives


def unknown(x: Tensor) -> Tensor:
    return x + 1


def chain(*, traced: bool = True) -> Program:
    """x -> sin -> unknown -> cos, with a weight."""
    graph = Graph()
    x = graph.placeholder("x")
    weight = graph.create_node("get_attr", "weight")
    sine = graph.call_function(torch.sin, (x,))
    scaled = graph.call_function(torch.mul, (sine, weight))
    strange = graph.call_function(unknown, (scaled,))
    graph.output(graph.call_function(torch.cos, (strange,)))
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(10))
    for node in graph.nodes if traced else ():
        node.meta["val"] = torch.ones(100, 10)
    return program_of(graph, root)


def by(labels: Mapping[str, Any]) -> ByLabel:
    return ByLabel(lambda node: labels.get(node.name))


def test_a_plan_prints_as_a_table() -> None:
    shown = str(plan(chain(), by({"sin": "first", "mul": "first", "cos": 7}), Call()))
    assert shown == text("""
        region  nodes  in  out  bytes in  bytes out  flops  treatment  label
        ------  -----  --  ---  --------  ---------  -----  ---------  -----
        first   2      2   1    8,000     4,000      0      Call()     first
        part_7  1      1   1    4,000     4,000      0      Call()     7
        excluded: 1 node: its label is None
        barriers: 1 call with unknown effects (unknown); where these have none, declare that with Program.of(..., pure=[...])
    """)  # noqa: E501
    assert shown == str(plan(chain(), by({"sin": "first", "mul": "first", "cos": 7}), Call()))


def test_unknown_bytes_are_a_question_mark() -> None:
    row = str(plan(chain(traced=False), by({"cos": "last"}), Call())).splitlines()[2]
    assert row.split() == ["last", "1", "1", "1", "?", "?", "?", "Call()", "last"]


def test_containers_that_cross_item_by_item_have_bytes() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    halves = graph.call_method("chunk", (x, 2))
    graph.output(graph.call_function(torch.cat, (halves,)))
    halves.meta["val"] = torch.ones(10).chunk(2)
    rows = str(plan(program_of(graph), by({"chunk": "a", "cat": "b"}), Call())).splitlines()
    assert rows[2].split()[5] == "40"
    assert rows[3].split()[4] == "40"


def test_regions_are_listed_in_the_order_in_which_they_run() -> None:
    shown = str(plan(chain(), by({"cos": "a", "sin": "b"}), Call())).splitlines()
    assert [line.split()[0] for line in shown[2:4]] == ["b", "a"]


def test_a_plan_explains_every_node() -> None:
    made = plan(chain(), by({"sin": "first", "mul": "first"}), Call())
    assert made.explain("sin") == "sin: in region 'first', treated by Call(), labelled 'first'"
    assert made.explain("weight") == "weight: outside every region: attributes are read outside and passed in"
    assert made.explain("x") == "x: an input of the program; in no region"
    assert made.explain("output").startswith("output: the output of the program; in no region")
    assert made.explain("unknown").splitlines()[:2] == [
        "unknown: outside every region: its label is None",
        "  its effects are unknown, so nothing with an effect moves past it",
    ]
    assert made.explain(made.program.node("cos")) == "cos: outside every region: its label is None"


def test_explaining_what_is_not_there_helps() -> None:
    made = plan(chain(), by({}), Call())
    with pytest.raises(UnknownNodeError, match="no node is called 'sinn'; did you mean 'sin'"):
        made.explain("sinn")
    with pytest.raises(UnknownNodeError, match="'sin' is not a node of this program"):
        made.explain(chain().node("sin"))


def switching() -> Program:
    """sin; chunk; then without gradients: an item of the chunk, and its cosine."""
    graph = Graph()
    x = graph.placeholder("x")
    pieces = graph.call_method("chunk", (graph.call_function(torch.sin, (x,)), 2))
    graph.call_function(SET_GRAD, (False,))
    first = graph.call_function(operator.getitem, (pieces, 0))
    value = graph.call_function(torch.cos, (first,))
    graph.call_function(SET_GRAD, (True,))
    graph.output((pieces, value))
    return program_of(graph)


def test_modes_and_moved_items_are_explained() -> None:
    made = plan(switching(), by({"sin": "a", "chunk": "a", "getitem": "b", "cos": "b"}), Call())
    assert "  it runs under no_grad" in made.explain("cos")
    assert "in region 'a'" in made.explain("getitem")
    assert "where the container is made that it takes an item from" in made.explain("getitem")
    assert "it only switches a mode" in made.explain("_set_grad_enabled")


def test_a_treatment_of_one_mode_refuses_two() -> None:
    with pytest.raises(ModeError, match=r"region 'all' holds 'sin' under .* and 'cos' under .* takes one mode"):
        plan(switching(), by({"sin": "all", "chunk": "all", "cos": "all"}), Rough())
    plan(switching(), by({"sin": "all", "chunk": "all", "cos": "all"}), Rough(allows_mixed_modes=True))


def test_a_getitem_brings_no_mode_into_a_body_of_one_mode() -> None:
    after = plan(switching(), by({"sin": "a", "chunk": "a", "getitem": "b", "cos": "b"}), Rough()).apply()
    body: Any = after.module().a
    assert not [node for node in body.graph.nodes if node.target in TOGGLES]
    verify(switching(), after, (torch.ones(4),))


def test_a_getitem_of_another_mode_is_no_reason_to_refuse() -> None:
    plan(switching(), by({"sin": "a", "chunk": "a", "getitem": "a"}), Rough())


def test_treatments_by_name_and_by_function() -> None:
    program, labels = chain(), by({"sin": "a", "cos": "b"})
    named = plan(program, labels, {"a": Call(), "b": Rough(0.5)})
    assert named.treatments == (Call(), Rough(0.5))
    chosen = plan(program, labels, lambda region: Rough() if region.name == "a" else Call())
    assert chosen.treatments == (Rough(), Call())


@pytest.mark.parametrize("treatment", [{"a": Call()}, lambda region: None, Call, "Call", None])
def test_a_region_without_a_treatment_is_refused(treatment: Any) -> None:
    with pytest.raises(OptionError, match=r"region '[ab]' (has no treatment|gets the class)"):
        plan(chain(), by({"sin": "a", "cos": "b"}), treatment)


def test_a_treatment_for_a_region_that_is_not_there_is_refused() -> None:
    treatments = {"a": Call(), "b": Call(), "bb": Rough()}
    with pytest.raises(OptionError, match=r"a treatment for 'bb', but no such region; did you mean 'b'\?"):
        plan(chain(), by({"sin": "a", "cos": "b"}), treatments)
    with pytest.raises(OptionError, match=r"but no such region; the policy found none$"):
        plan(chain(), by({}), {"a": Call()})


@pytest.mark.parametrize("gives", [None, 3, torch.sin])
def test_a_treatment_that_gives_no_module_is_refused(gives: object) -> None:
    with pytest.raises(PartitaError, match="'a'"):
        plan(chain(), by({"sin": "a"}), Rough(gives=gives)).apply()


@dataclass(frozen=True)
class Marking:
    """A treatment with marks of its own."""

    given: object

    def marks(self, region: Region) -> Any:
        return 1 / 0 if self.given == "raise" else self.given


@pytest.mark.parametrize("given", [None, 3, "raise"])
@pytest.mark.parametrize("act", ["apply", "annotate"])
def test_marks_that_are_no_marks_are_refused(given: object, act: str) -> None:
    with pytest.raises(PartitaError, match="'a'"):
        getattr(plan(chain(), by({"sin": "a"}), Marking(given)), act)()


def test_a_policy_must_give_a_partition_of_this_program() -> None:
    with pytest.raises(OptionError, match="a policy returns a Partition, not NoneType"):
        plan(chain(), lambda program: None, Call())  # type: ignore[arg-type, return-value]
    with pytest.raises(OptionError, match="of another program"):
        plan(chain(), by({})(chain()), Call())


def test_tolerances_are_united() -> None:
    made = plan(chain(), by({"sin": "a", "cos": "b"}), {"a": Rough(0.5, 0.0), "b": Rough(0.1, 2.0)})
    assert made.tolerance == Tolerance(0.5, 2.0)
    assert made.apply().tolerance == Tolerance(0.5, 2.0)
    again = plan(made.apply(), by({}), Call()).apply()
    assert again.tolerance == Tolerance(0.5, 2.0)


def test_annotating_cuts_nothing_and_marks_regions() -> None:
    program = chain()
    marked = plan(program, by({"sin": "a", "cos": "b"}), {"a": Mark("stage"), "b": Mark("stage", 5)}).annotate()
    assert listing(marked) == listing(program)
    assert [node.meta.get("stage") for node in marked.graph.nodes] == [None, None, "a", None, None, 5, None]
    assert "stage" not in program.node("sin").meta
    assert marked.graph_module.weight is program.graph_module.weight
    assert fingerprint(marked) == fingerprint(program)


def test_marks_of_an_applied_plan_are_inside_the_body() -> None:
    after: Any = plan(chain(), by({"sin": "a", "mul": "a"}), Mark("stage")).apply().module()
    assert [node.meta.get("stage") for node in after.a.graph.nodes] == [None, None, "a", "a", None]


def test_applying_twice_gives_two_programs_and_changes_none() -> None:
    made: Plan = plan(chain(), by({"sin": "a", "cos": "b"}), Call())
    before = dump(made.program.graph_module)
    one, other = made.apply(), made.apply()
    assert listing(one) == listing(other)
    assert one.graph_module is not other.graph_module
    assert one.graph_module.a is not other.graph_module.a
    assert one.graph_module.weight is other.graph_module.weight
    assert dump(made.program.graph_module) == before


def test_a_second_plan_collides_with_no_name() -> None:
    once = cut(chain(), {"sin": "a", "cos": "b"})
    twice = cut(once, {"mul": "a", "b": "b", "unknown": "weight"})
    assert {"a", "a_1", "b_1", "weight_1"} <= {name for name, _ in twice.module().named_children()}
    twice.graph.lint()
    assert len({node.name for node in twice.graph.nodes}) == len(twice.graph.nodes)
    verify(chain(), twice, (torch.randn(100, 10),))


def test_a_plan_tells_what_it_is() -> None:
    decided = plan(chain(), by({"sin": "a"}), Call())
    assert repr(decided) == f"Plan of Program(GraphModule, 7 nodes): {decided.summary()}"
    assert decided.summary().startswith("1 node in 1 region, ")


def test_explaining_a_node_looks_at_its_neighbours_and_not_at_the_whole_graph() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    for _ in range(4_000):
        x = graph.call_method("add_", (x, 1))
    graph.output(x)
    made = plan(Program.of(GraphModule(nn.Module(), graph)), BySize(parts=100), Call())
    made.explain("add__7")
    assert calls_during(made.explain, "add__2000") < 1_000


def test_a_treatment_in_the_place_of_the_policy_is_named() -> None:
    with pytest.raises(OptionError, match=r"Call\(\) is a treatment; the policy comes first"):
        plan(chain(), Call(), by({"sin": "a"}))  # type: ignore[arg-type]


@pytest.mark.parametrize("treatment", [Call, {"a": Call}])
def test_a_class_in_the_place_of_a_treatment_is_named(treatment: Any) -> None:
    with pytest.raises(OptionError, match=r"gets the class Call, not a treatment; write Call\(\.\.\.\)"):
        plan(chain(), by({"sin": "a"}), treatment)


@pytest.mark.parametrize(
    ("treatments", "message"),
    [
        ({"chosen": Call()}, r"'chosen', but no such region: it is the label of 'cos', .* a mapping is by region name"),
        ({"choosing": Call()}, r"there are 'part_0', 'cos', 'part_1', labelled 'chosen'"),
        ({"part_2": Call()}, r"did you mean 'part_1', 'part_0'\?"),
        ({"cos": Call()}, r"region 'part_0' \(labelled 'between'\) has no treatment among 'cos'; add one"),
    ],
)
def test_a_mapping_by_label_says_which_names_there_are(treatments: dict[str, Treatment], message: str) -> None:
    program = program_of(lambda x: x.sin().cos().tan())
    with pytest.raises(OptionError, match=message):
        plan(program, AroundOperators("cos"), treatments)


def test_a_function_to_treatments_that_raises_is_an_error_with_its_region() -> None:
    program = capture(nn.ReLU(), (torch.ones(2),))
    with pytest.raises(CallbackError, match=r"treatments raised KeyError for region 'part_0': 'part_0'") as caught:
        plan(program, BySize(parts=1), lambda region: {}[region.name])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_program_whose_autocast_blocks_are_operators_has_the_tolerance_of_its_blocks() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.layer(x)
            return y.float().sin() * x

    captured = capture(Casting(), (torch.randn(4, 4),))
    tolerances = [
        plan(program, BySize(parts=2), Call()).apply().tolerance
        for program in (captured, Program.of(captured.exported()))
    ]
    assert tolerances[0] == tolerances[1] == Tolerance(rounding=torch.finfo(torch.bfloat16).eps)


def test_operators_under_autocast_may_be_called_with_keywords() -> None:
    def body_and_call(names: bool) -> Program:
        inner, outer = Graph(), Graph()
        inner.output((inner.call_function(torch.relu, (inner.placeholder("x"),)),))
        outer.placeholder("x")
        body = outer.get_attr("body")
        named = {"dtype": torch.bfloat16, "enabled": True, "cache_enabled": None, "wrapped_func": body}
        args = ("cpu",) if names else ("cpu", *named.values())
        outer.output(outer.call_function(WRAP_WITH_AUTOCAST, args, named if names else {}))
        return Program.of(GraphModule({"body": GraphModule(nn.Module(), inner)}, outer))

    tolerances = [plan(body_and_call(names), BySize(parts=1), Call()).apply().tolerance for names in (False, True)]
    assert tolerances == [Tolerance(rounding=torch.finfo(torch.bfloat16).eps)] * 2
