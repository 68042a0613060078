"""Signatures of exported programs after a cut: inputs, outputs, mutations, ties, ranges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.core import listing, text
from tests.program.exported_helpers import (
    CASES,
    LINEAR,
    Answer,
    Case,
    Model,
    Pair,
    case_of,
    cut,
    original,
    reloaded,
    rows,
)
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, unflatten
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph

from partita import Program, fingerprint, inline, plan, verify
from partita.policies import AroundOperators, ByLabel
from partita.program.exported import settle_stacks
from partita.treatments import Call, Mark

pytestmark = pytest.mark.filterwarnings("ignore")


def _call(exported: ExportedProgram, case: Case) -> Any:
    return exported.module()(*case.args(), **case.kwargs())


def _kinds(exported: ExportedProgram) -> list[tuple[OutputKind, str | None]]:
    return [(spec.kind, spec.target) for spec in exported.graph_signature.output_specs]


class Counted(str):
    """A text that counts how often any of them is hashed."""

    __slots__ = ()
    hashed = 0

    def __hash__(self) -> int:
        Counted.hashed += 1
        return super().__hash__()

    __eq__ = str.__eq__


def test_the_modules_around_a_node_are_looked_at_once_each() -> None:
    def work(depth: int) -> int:
        graph = Graph()
        x = graph.placeholder("x")
        for call in range(4):
            x = graph.call_function(torch.sin, (x,))
            around = {f"{call}_{level}": (Counted("a"), "M") for level in range(depth)}
            x.meta["nn_module_stack"] = {f"{call}": ("", "M"), **around}
        Counted.hashed = 0
        settle_stacks(graph)
        assert len(x.meta["nn_module_stack"]) == depth + 1
        return Counted.hashed

    assert work(400) < 2.1 * work(200)


def test_a_node_stays_out_of_a_call_that_has_ended() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    stacks: list[dict[str, Any]] = [
        {"": ("", "M"), "a": ("a", "A"), "b": ("a.b", "B")},
        {"": ("", "M"), "a": ("a", "A")},
        {"": ("", "M"), "a": ("a", "A"), "b": ("a.b", "B")},
        {"": ("", "M"), "c": ("c", "C"), "b": ("a.b", "B")},
        {"": ("", "M"), "a": ("a", "A")},
    ]
    for stack in stacks:
        x = graph.call_function(torch.sin, (x,))
        x.meta["nn_module_stack"] = stack
    settle_stacks(graph)
    settled = [list(node.meta["nn_module_stack"]) for node in graph.find_nodes(op="call_function", target=torch.sin)]
    assert settled == [["", "a", "b"], ["", "a"], ["", "a"], ["", "c", "b"], [""]]


def test_a_region_is_one_call_of_its_body_and_outputs_keep_their_names() -> None:
    after = cut(original("chain"), "two parts")
    assert listing(after) == text("""
        p_weight: input
        p_first_weight: input
        p_first_bias: input
        p_second_weight: input
        p_second_bias: input
        b_count: input
        b_fleeting: input
        args_0: input
        part_0_body = self.part_0
        part_0 = partita_call(part_0_body, args_0, p_first_weight, p_first_bias, p_weight)
        mul = getitem(part_0, 0)
        part_1_body = self.part_1
        part_1 = partita_call(part_1_body, mul, b_fleeting, p_second_weight, p_second_bias)
        linear_1 = getitem(part_1, 0)
        return (linear_1,)
    """)
    assert after.exported().graph_signature.user_outputs == ("linear_1",)


def test_nested_outputs_have_their_types() -> None:
    found = _call(cut(original("structures"), "every operator").exported(), CASES["structures"])
    assert type(found["pair"]) is Pair
    assert type(found["nested"][1][1]) is dict
    answer = _call(cut(original("dataclasses"), "every operator").exported(), CASES["dataclasses"])
    assert type(answer) is Answer
    assert [*answer.extra] == ["b", "a"]


def test_constants_and_none_are_returned() -> None:
    assert _call(cut(original("constants"), "one part").exported(), CASES["constants"])[1:] == (
        None,
        3,
        (None, 2.5, True),
    )


def test_an_output_that_is_an_input_a_parameter_or_returned_twice_is_that_tensor() -> None:
    exported = cut(original("repeated"), "one part").exported()
    x = rows()
    module: Any = exported.module()
    first, given, weight, again, count, _ = module(x)
    assert first is again
    assert given is x
    assert weight is module.weight is original("repeated").state_dict["weight"]
    assert count is module.count


@pytest.mark.parametrize("name", ["writes_buffer", "custom", "only_writes"])
def test_buffer_mutations_name_what_now_gives_them(name: str) -> None:
    exported = original(name, "decomposed")
    result = cut(exported, "one part").exported()
    assert _kinds(result) == _kinds(exported)
    assert (OutputKind.BUFFER_MUTATION, "count") in _kinds(result)
    names = {node.name for node in result.graph.nodes}
    assert set(result.graph_signature.buffers_to_mutate) <= names


def test_input_mutations_name_what_now_gives_them() -> None:
    result = cut(original("writes_input", "decomposed"), "two parts").exported()
    assert (OutputKind.USER_INPUT_MUTATION, "args_1") in _kinds(result)
    x, seen = CASES["writes_input"].args()
    result.module()(x, seen)
    assert seen.any()


def test_a_training_program_has_its_writes_in_the_bodies_until_it_is_decomposed() -> None:
    after = cut(original("writes_buffer"), "one part").exported()
    assert _kinds(after) == [(OutputKind.USER_OUTPUT, None)]
    decomposed = after.run_decompositions({})
    assert _kinds(decomposed) == _kinds(original("writes_buffer", "decomposed"))


def test_tied_weights_stay_one_parameter() -> None:
    module = cut(original("tied"), "two parts").module()
    assert module.get_parameter("head.weight") is module.get_parameter("embedding.weight")
    assert len(list(module.parameters())) == 1


def test_fleeting_buffers_and_constants_stay_out_of_the_state() -> None:
    exported = cut(original("chain"), "every operator").exported()
    assert exported.graph_signature.non_persistent_buffers == ("fleeting",)
    assert "fleeting" not in exported.state_dict
    assert exported.constants["fleeting"] is original("chain").constants["fleeting"]
    lifted = cut(original("repeated"), "every operator").exported().graph_signature
    assert InputKind.CONSTANT_TENSOR in {spec.kind for spec in lifted.input_specs}


def test_keywords_go_by_their_names() -> None:
    case, module = CASES["keywords"], cut(original("keywords"), "one part").module()
    given = case.kwargs()
    swapped = {"shift": given["shift"], "scale": given["scale"]}
    assert torch.equal(module(rows(), **swapped), case.build()(rows(), **given))


def test_ranges_are_kept_and_other_sizes_run() -> None:
    exported = cut(original("sizes"), "every operator").exported()
    assert [(str(bounds.lower), str(bounds.upper)) for bounds in exported.range_constraints.values()] == [("2", "64")]
    module, model = exported.module(), CASES["sizes"].build()
    for count in (2, 17):
        found, expected = module(torch.ones(count, 4)), model(torch.ones(count, 4))
        assert torch.equal(found[0], expected[0])
        assert found[1] == expected[1] == count * 2
    with pytest.raises(AssertionError, match="64"):
        module(torch.ones(65, 4))


def test_numbers_go_in_and_out() -> None:
    assert cut(original("number_input"), "one part").module()(rows(), 7)[1] == 8


def test_conditions_on_sizes_are_kept_after_loading() -> None:
    def does(m: Model, x: Tensor, y: Tensor) -> Tensor:
        return (x + y)[:, :2]

    auto = {0: Dim.AUTO, 1: Dim.AUTO}
    exported = case_of(does, rows, shapes=((auto, auto),)).exported()
    module = cut(reloaded(exported), "every operator").module()
    with pytest.raises(AssertionError, match="Guard failed"):
        module(torch.ones(3, 2), torch.ones(3, 2))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        return {"y": self.outer(torch.tanh(self.inner(x))) * scale, "z": x + 1}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.other = Scaled(), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        one = self.block(x * 2, scale=x.sum())
        two = self.other(one["y"] + one["z"], scale=one["z"])
        return two["y"] * two["z"]


KEPT = {"two parts": [], "every operator": ["block", "other"], "by module": ["block", "other"], "around layers": []}


@pytest.mark.parametrize("how", KEPT)
def test_signatures_of_modules_are_kept_where_a_module_is_still_called(how: str) -> None:
    case = Case(Blocks)
    after = cut(case.exported(preserve_module_call_signature=("block", "other")), how)
    exported = after.exported()
    assert [entry.fqn for entry in exported.module_call_graph if entry.fqn and entry.signature] == KEPT[how]
    assert torch.equal(unflatten(exported)(rows()), Blocks()(rows()))
    flat: Any = unflatten(inline(after).exported())
    assert flat.block(rows(), scale=rows()).keys() == {"y", "z"}


def test_regions_called_like_modules_or_nodes_leave_these_alone() -> None:
    exported = CASES["chain"].exported()
    labels = {"linear": "second", "tanh": "linear_1", "mul": "weight", "linear_1": "first"}
    after = plan(Program.of(exported), ByLabel(lambda node: labels.get(node.name)), Call()).apply()
    module = after.module()
    assert {*module.state_dict()} == {*exported.state_dict}
    assert {name for name, _ in module.named_parameters()} == {
        name for name, _ in CASES["chain"].build().named_parameters()
    }
    assert torch.equal(unflatten(after.exported())(rows()), CASES["chain"].build()(rows()))


def test_a_region_of_nothing_but_items_is_no_call() -> None:
    def does(m: Model, x: Tensor) -> Any:
        left, right = m.first(x).split(2, 1)
        return left * right

    case = case_of(does)
    program = Program.of(case.exported())
    after = plan(program, ByLabel(lambda node: "items" if node.name.startswith("getitem") else None), Call()).apply()
    verify(program, after, case.args())
    assert listing(after.exported().graph) == listing(program)


def test_marks_are_on_the_nodes_inside_and_change_nothing_else() -> None:
    program = Program.of(original("chain"))
    planned = plan(program, AroundOperators(LINEAR), Mark("speed", "fast"))
    after = planned.apply()
    body: Any = after.graph_module.get_submodule("part_0")
    assert {node.meta.get("speed") for node in body.graph.nodes if node.op == "call_function"} == {"fast"}
    verify(program, after, (rows(),))
    marked = planned.annotate()
    assert fingerprint(marked) == fingerprint(program)
    assert str(marked.exported().graph) == str(original("chain").graph)
    assert not any("speed" in node.meta for node in original("chain").graph.nodes)


def test_what_is_made_of_a_program_does_not_change_it() -> None:
    program = cut(original("normalised", "decomposed"), "every operator")
    before, marks = listing(program), fingerprint(inline(program))
    exported = program.exported()
    exported.module()
    exported.graph.erase_node(next(iter(reversed(exported.graph.nodes))))
    assert listing(program) == before
    assert fingerprint(inline(program)) == marks
