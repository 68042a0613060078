"""Splitting a graph: how parts are named, called and structured, and what of the input stays as it was."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compat.split_helpers import CUTS, GETITEM, Cut, Draft, by_name, dump, every, in_turn, operators, parts
from tests.compat.split_models import (
    Colliding,
    autocast_draft,
    check,
    graded,
    inferring,
    nested_modes,
    reshaping,
    residual,
    runs,
    sizes,
    structured,
    x4,
)
from torch import Tensor, nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.passes.split_module import split_module as torch_split

import partita
from partita.compat.split_module import split_module, split_module_simple
from partita.policies import ByLabel
from partita.treatments import Call

# Once per node ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [residual, graded])
def test_the_callback_is_called_once_per_operator_in_graph_order(cut: Cut, make: Callable[[], GraphModule]) -> None:
    module, asked = make(), []

    def label(node: Node) -> int:
        asked.append(node)
        return len(asked) // 2

    cut(module, label)
    assert asked == operators(module)


def test_a_counter_gives_the_parts_of_one_call_per_node_also_with_a_grad_region(cut: Cut) -> None:
    module = graded()
    result = cut(module, every(3))
    held = [
        [node.name for node in part.graph.nodes if node.op == "call_function" and "grad" not in node.name]
        for part in parts(result).values()
    ]
    assert [len(names) for names in held] == [2, 2, 2]
    check(module, result, x4().requires_grad_())


def test_numbers_and_their_text_are_one_part() -> None:
    module = residual()
    result = split_module(module, None, in_turn([1, "1", 1, "2", 2]))
    assert result.meta["partition_names"] == {"submod_1", "submod_2"}
    check(module, result, x4())


# Names -----------------------------------------------------------------------------------------------------------


def test_distinct_targets_in_one_part_never_share_a_name(cut: Cut) -> None:
    module = symbolic_trace(Colliding())
    check(module, cut(module, lambda node: 0), x4())
    check(module, cut(module, every(2)), x4())


def test_the_qualname_map_is_one_to_one_where_names_collide() -> None:
    module, names = symbolic_trace(Colliding()), {}
    result = split_module(module, None, lambda node: 0, names)
    assert sorted(names.values()) == ["a.b", "a_b", "a_b_1"]
    for new, old in names.items():
        assert result.get_submodule(new) is module.get_submodule(old)


def test_a_module_called_in_two_parts_is_one_module(cut: Cut) -> None:
    module = symbolic_trace(Colliding())
    result = cut(module, every(1))
    linears = {id(child) for child in result.modules() if isinstance(child, nn.Linear)}
    assert linears == {id(child) for child in module.modules() if isinstance(child, nn.Linear)}
    check(module, result, x4())


def test_a_placeholder_called_like_a_part_does_not_hide_it(cut: Cut) -> None:
    draft = Draft()
    x, y = draft.input("submod_0"), draft.input("part_1")
    module = draft.done(draft.call(torch.mul, draft.call(torch.add, x, y), y))
    check(module, cut(module, every(1)), x4(), x4() + 1)


def test_inputs_called_arg_do_not_collide_with_numbered_inputs() -> None:
    draft = Draft()
    one, zero = draft.input("arg_1"), draft.input("arg_0")
    module = draft.done(draft.call(torch.sub, draft.call(torch.mul, one, 2.0), zero))
    result = split_module(module, None, every(1), keep_original_input_name=False)
    assert [node.target for node in result.submod_1.graph.nodes][:2] == ["arg_0", "arg_1"]
    check(module, result, x4(), x4() + 1)


def test_a_second_split_of_a_result_collides_with_no_name(cut: Cut) -> None:
    module = symbolic_trace(Colliding())
    once = cut(module, every(2))
    twice = cut(once, every(1))
    check(module, twice, x4())
    check(module, cut(twice, lambda node: 0), x4())
    assert {id(p) for p in twice.parameters()} == {id(p) for p in module.parameters()}


def test_an_attribute_called_like_a_part_stays_reachable(cut: Cut) -> None:
    draft = Draft(submod_0=nn.Linear(4, 4), part_0=nn.Parameter(torch.ones(4)))
    x = draft.input("x")
    y = draft.module("submod_0", x)
    z = draft.call(torch.add, y, draft.attr("part_0"))
    module = draft.done(draft.call(torch.relu, z))
    check(module, cut(module, every(1)), x4())


def test_a_parameter_called_like_a_part_stays_reachable(cut: Cut) -> None:
    draft = Draft(submod_0=nn.Parameter(torch.full((4,), 3.0)))
    x = draft.input("x")
    module = draft.done(draft.call(torch.relu, draft.call(torch.add, x, draft.attr("submod_0"))))
    check(module, cut(module, every(1)), x4())


MODE_CUTS = {"off": 0, "a": 0, "b": 1, "on": 1, "enter": 1, "c": 1, "d": 2, "leave": 2, "z": 2}


def switching() -> GraphModule:
    """A no_grad block and an autocast block, each across two parts."""
    graph = Graph()

    def call(name: str, target: Any, *args: Any) -> Node:
        node = graph.create_node("call_function", target, args, name=name)
        node.meta["said"] = name
        return node

    x = graph.placeholder("x")
    call("off", torch._C._set_grad_enabled, False)
    a = call("a", torch.sin, x)
    b = call("b", torch.cos, a)
    call("on", torch._C._set_grad_enabled, True)
    entered = call("enter", _enter_autocast, "cpu", torch.bfloat16, True, None)
    c = call("c", torch.tan, b)
    d = call("d", torch.exp, c)
    call("leave", _exit_autocast, entered)
    graph.output(call("z", torch.exp, d))
    return GraphModule(nn.Module(), graph)


def toggles_in(result: GraphModule) -> list[list[tuple[str, str, Any]]]:
    """The switches of each part that are named as they were, with what they do and what is noted of them."""
    return [
        [(n.name, n.target.__name__, n.meta["said"]) for n in part.graph.nodes if n.name in MODE_CUTS and n.name > "d"]
        for part in parts(result).values()
    ]


def test_mode_switches_keep_their_names_in_their_parts() -> None:
    splits = (split_module, torch_split)
    found = [
        toggles_in(split(switching(), None, lambda node: MODE_CUTS[node.name], keep_original_node_name=True))
        for split in splits
    ]
    assert found[0] == found[1]
    result = split_module(switching(), None, lambda node: MODE_CUTS[node.name], keep_original_node_name=True)
    check(switching(), result, x4())


def test_one_part_keeps_all_names_of_its_mode_switches() -> None:
    (part,) = parts(split_module(switching(), None, lambda node: 0, keep_original_node_name=True)).values()
    names = [node.name for node in part.graph.nodes if node.op == "call_function"]
    assert [name for name in names if name in MODE_CUTS] == list(MODE_CUTS)


def test_keeping_the_order_leaves_no_dead_read_of_a_module() -> None:
    draft = Draft(branch=symbolic_trace(lambda x: (x.sin(),)), weight=nn.Parameter(torch.ones(4)))
    x, branch, weight = draft.input("x"), draft.attr("branch"), draft.attr("weight")
    first = draft.call(GETITEM, draft.call(torch.ops.higher_order.cond, True, branch, branch, [x]), 0)
    module = draft.done((draft.call(torch.mul, first, weight), weight))
    result = split_module(module, None, by_name({"mul": 1}), keep_original_order=True)
    assert [node.name for node in result.graph.find_nodes(op="get_attr")] == ["weight"]
    check(module, result, x4())


@pytest.mark.parametrize("label", ["class", "forward", "a.b", "with space", "", "graph", "training", "1", "é", "x"])
def test_any_text_is_a_label(cut: Cut, label: str) -> None:
    module = residual()
    result = cut(module, in_turn([label, label, "other", "other", label + "_"]))
    check(module, result, x4())
    check(module, pickle.loads(pickle.dumps(result)), x4())
    check(module, cut(result, every(2)), x4())


@pytest.mark.parametrize("affix", ["a.b", "a-b", "", "1"])
def test_any_text_is_an_affix(affix: str) -> None:
    module = residual()
    check(module, split_module(module, None, every(2), partition_affix=affix), x4())


# Calling convention and structure --------------------------------------------------------------------------------


KINDS = ["dict", "dataclass", "list", "namedtuple", "tuple"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_module_stays_callable_and_returns_the_same_structure(cut: Cut, kind: str) -> None:
    args, kwargs = (x4(), {"bias": x4() + 1}), {"scale": x4() + 2}
    module = structured(kind)
    for step in (1, 2, 100):
        result = cut(module, every(step))
        check(module, result, *args, **kwargs)
        assert "call_module" in {node.op for node in result.graph.nodes}


def test_the_code_generator_of_the_input_is_not_shared(cut: Cut) -> None:
    module = structured("dict")
    result = cut(module, every(2))
    assert result.graph._codegen is not module.graph._codegen
    assert type(result.graph._codegen) is type(module.graph._codegen)


def test_arguments_by_keyword_and_defaults_reach_a_split_module(cut: Cut) -> None:
    def forward(x: Tensor, scale: float = 2.0, shift: Tensor | None = None) -> Tensor:
        return torch.sin(x * scale) + 1

    module = symbolic_trace(forward)
    result = cut(module, every(1))
    for args, kwargs in [((x4(),), {}), ((), {"x": x4()}), ((x4(),), {"scale": 3.0}), ((x4(), 4.0), {"shift": None})]:
        check(module, result, *args, **kwargs)
    before, after = (list(each.graph.find_nodes(op="placeholder")) for each in (module, result))
    assert [(n.target, n.args, n.type) for n in before] == [(n.target, n.args, n.type) for n in after]


@pytest.mark.parametrize("keep_names", [False, True])
@pytest.mark.parametrize("keep_order", [False, True])
def test_star_arguments_survive(keep_names: bool, keep_order: bool) -> None:
    draft = Draft()
    x, rest, named = draft.input("x"), draft.input("*rest"), draft.input("**named")
    first = draft.call(GETITEM, rest, 0)
    second = draft.call(GETITEM, named, "y")
    module = draft.done(draft.call(torch.mul, draft.call(torch.add, x, first), second))
    result = split_module(module, None, every(1), None, keep_order, keep_names)
    check(module, result, x4(), x4() + 1, y=x4() + 2)


def test_star_arguments_survive_every_cut(cut: Cut) -> None:
    draft = Draft()
    x, rest, named = draft.input("x"), draft.input("*rest"), draft.input("**named")
    total = draft.call(torch.add, x, draft.call(GETITEM, rest, 0))
    module = draft.done(draft.call(torch.mul, total, draft.call(GETITEM, named, "y")))
    check(module, cut(module, in_turn([0, 1, 0, 1])), x4(), x4() + 1, y=x4() + 2)


def test_keeping_node_names_keeps_the_call_signature(cut: Cut) -> None:
    draft = Draft()
    x, y = draft.input("input"), draft.input("y")
    assert x.name != x.target
    module = draft.done(draft.call(torch.sub, draft.call(torch.sin, x), y))
    result = cut(module, every(1))
    check(module, result, input=x4(), y=x4() + 1)
    kept = split_module(module, None, every(1), keep_original_node_name=True)
    check(module, kept, input=x4(), y=x4() + 1)


@pytest.mark.parametrize("make", [residual, graded, autocast_draft, nested_modes, reshaping])
def test_keeping_node_names_keeps_every_name_also_where_a_region_is_re_entered(make: Callable[[], GraphModule]) -> None:
    module = make()
    for step in (1, 2, 3):
        for order in (False, True):
            result = split_module(module, None, every(step), None, order, True)
            inside = Counter(node.name for part in parts(result).values() for node in operators(part))
            toggles = {
                node.name
                for node in operators(module)
                if any(w in node.name for w in ("grad", "autocast", "inference"))
            }
            wanted = {node.name for node in operators(module)} - toggles
            assert {name for name in wanted if inside[name] != 1} == set()


def test_outputs_that_are_inputs_constants_or_nothing_keep_their_place(cut: Cut) -> None:
    draft = Draft(weight=nn.Parameter(torch.ones(4)))
    x, _ = draft.input("x"), draft.input("unused")
    weight = draft.attr("weight")
    a = draft.call(torch.add, x, weight)
    b = draft.call(torch.sin, a)
    module = draft.done(
        {"x": x, "none": None, "three": [3, "text", 2.5], "twice": (b, b), "weight": weight, "a": (a, [x])}
    )
    result = cut(module, every(1))
    check(module, result, x4(), x4())
    tensor = x4()
    out = result(tensor, tensor)
    assert out["x"] is tensor
    assert out["weight"] is module.weight
    assert out["twice"][0] is out["twice"][1]


def test_graphs_without_operators_pass_through(cut: Cut) -> None:
    draft = Draft(weight=nn.Parameter(torch.ones(4)))
    x = draft.input("x")
    module = draft.done((x, draft.attr("weight"), None))
    check(module, cut(module, every(1)), x4())
    empty = Draft().done(None)
    assert cut(empty, every(1))() is None


def test_an_operator_without_users_runs_and_stays(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    draft.call(torch.sin, x)
    module = draft.done(draft.call(torch.cos, x))
    result = cut(module, every(1))
    check(module, result, x4())
    assert sum(len(operators(part)) for part in parts(result).values()) == 2


def test_keeping_the_order_works_where_the_first_node_precedes_its_producer(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    a = draft.call(torch.sin, x)
    b = draft.call(torch.cos, x)
    c = draft.call(torch.add, a, b)
    module = draft.done((c, draft.call(torch.mul, b, 2.0)))
    check(module, cut(module, in_turn([0, 1, 0, 1])), x4())
    check(module, split_module(module, None, in_turn([0, 1, 0, 1]), keep_original_order=True), x4())


def test_attributes_are_read_before_their_first_part_in_the_original_order() -> None:
    draft = Draft(one=nn.Parameter(torch.ones(4)), two=nn.Parameter(torch.ones(4)))
    x = draft.input("x")
    a = draft.call(torch.add, x, draft.attr("one"))
    module = draft.done(draft.call(torch.add, a, draft.attr("two")))
    result = split_module(module, None, every(1), keep_original_order=True)
    assert [node.name for node in result.graph.nodes] == ["x", "one", "submod_0", "two", "submod_1", "output"]
    check(module, result, x4())


# The input stays as it was; metadata -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [residual, graded, nested_modes, autocast_draft, reshaping, inferring])
def test_the_input_is_untouched(cut: Cut, make: Callable[[], GraphModule]) -> None:
    module = make()
    for at, node in enumerate(module.graph.nodes):
        node.meta["custom"] = {"list": [at], "dict": {"at": at}}
    before = dump(module)
    result = cut(module, every(2))
    assert dump(module) == before
    runs(result, torch.ones(6, 4) if make is reshaping else torch.ones(4, 4))
    assert dump(module) == before


def test_nested_metadata_is_not_shared_with_the_input(cut: Cut) -> None:
    draft = Draft(weight=nn.Parameter(torch.ones(4)))
    x = draft.input("x")
    y = draft.call(torch.mul, draft.call(torch.sin, x), draft.attr("weight"))
    module = draft.done(draft.call(torch.cos, y))
    for node in module.graph.nodes:
        node.meta["custom"] = {"deep": {"list": [node.name]}}
    module.meta["config"] = {"deep": [1]}
    result = cut(module, every(1))
    for each in (result, *parts(result).values()):
        for node in each.graph.nodes:
            if "custom" in node.meta:
                node.meta["custom"]["deep"]["list"].append("edited")
                node.meta["custom"]["deep"]["new"] = 1
    result.meta.setdefault("config", {"deep": []})["deep"].append(2)
    for node in module.graph.nodes:
        assert node.meta["custom"] == {"deep": {"list": [node.name]}}
    assert module.meta["config"] == {"deep": [1]}


def test_module_metadata_is_kept(cut: Cut) -> None:
    module = residual()
    module.meta["dynamo_flat_name_to_original_fqn"] = {"a": "b"}
    result = cut(module, every(2))
    assert result.meta["dynamo_flat_name_to_original_fqn"] == {"a": "b"}
    assert "partition_names" not in module.meta


def test_the_metadata_of_every_operator_arrives_in_its_part(cut: Cut) -> None:
    module = reshaping()
    for node in module.graph.nodes:
        node.meta["origin"] = node.name
    result = cut(module, every(2))
    inside = {n.meta.get("origin") for part in parts(result).values() for n in operators(part)}
    outside = {node.meta.get("origin") for node in result.graph.nodes}
    assert {node.name for node in operators(module)} <= inside | outside
    assert {node.name for node in module.graph.nodes if node.op in ("placeholder", "output")} <= outside


@pytest.mark.parametrize("key", ["val", "example_value"])
def test_the_outer_calls_and_items_carry_the_values_that_they_give(cut: Cut, key: str) -> None:
    draft = Draft()
    value = torch.empty(4)
    x = draft.input("x", **{key: value})
    a = draft.call(torch.sin, x, meta={key: torch.empty(4, 1)})
    b = draft.call(torch.cos, x, meta={key: torch.empty(4, 2)})
    c = draft.call(torch.add, a, b, meta={key: torch.empty(4, 3)})
    module = draft.done((draft.call(torch.neg, c, meta={key: torch.empty(4, 5)}), a))
    result = cut(module, in_turn([0, 0, 1, 2]))
    for node in result.graph.nodes:
        if node.op in ("call_module", "call_function"):
            assert key in node.meta, node
            if node.op == "call_module":
                output = result.get_submodule(str(node.target)).graph.output_node().args[0]
                wanted, given = (each if isinstance(each, tuple) else (each,) for each in (output, node.meta[key]))
                assert [id(value) for value in given] == [id(inner.meta[key]) for inner in wanted]
            else:
                call, at = node.args
                assert node.meta[key] is call.meta[key][at]


def test_traced_values_do_not_carry_over_stack_traces_of_other_nodes(cut: Cut) -> None:
    module = residual()
    for node in operators(module):
        node.meta["stack_trace"] = node.name
    result = cut(module, every(1))
    for part in parts(result).values():
        for node in operators(part):
            assert node.meta["stack_trace"].startswith(node.name.split("_")[0])


@pytest.mark.parametrize("training", [True, False])
def test_the_training_flag_is_that_of_the_input(cut: Cut, training: bool) -> None:
    module = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU())).train(training)
    result = cut(module, every(1))
    assert result.training is training
    assert all(part.training is training for part in parts(result).values())
    check(module, result, x4())
    result.train(not training)
    assert module.get_submodule("1").training is not training


def test_a_child_with_a_training_flag_of_its_own_keeps_it(cut: Cut) -> None:
    module = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.5))).train()
    module.get_submodule("1").eval()
    result = cut(module, every(1))
    flags = [child.training for child in result.modules() if isinstance(child, nn.Dropout)]
    assert flags == [False, True]
    check(module, result, x4())


# Simple splitting ------------------------------------------------------------------------------------------------


def test_a_simple_split_does_not_break_a_later_split_of_the_same_graph() -> None:
    module = residual()
    before = dump(module)
    split_module_simple(module, {node: at for at, node in enumerate(operators(module))})
    assert dump(module) == before
    check(module, split_module(module, None, lambda node: 0), x4())
    from torch.fx.passes.split_module import split_module as torch_split_module

    check(module, torch_split_module(module, None, lambda node: 0), x4())


def test_a_simple_split_sorts_interleaved_parts() -> None:
    draft = Draft()
    x = draft.input("x")
    a = draft.call(torch.sin, x)
    b = draft.call(torch.cos, x)
    module = draft.done(draft.call(torch.add, a, b))
    nodes = operators(module)
    result = split_module_simple(module, {nodes[0]: 0, nodes[1]: 1, nodes[2]: 0})
    assert list(parts(result)) == ["submod_1", "submod_0"]
    check(module, result, x4())


def test_a_simple_split_does_not_decompose_the_sizes_of_its_input() -> None:
    module = sizes("dynamo")
    before = dump(module)
    split_module_simple(module, {node: at // 2 for at, node in enumerate(operators(module))})
    assert dump(module) == before


def test_a_simple_split_takes_a_mapping_that_covers_more_than_the_operators() -> None:
    module = residual()
    result = split_module_simple(module, dict.fromkeys(module.graph.nodes, 0))
    check(module, result, x4())


# Regions that are legal one by one, natively ---------------------------------------------------------------------


def test_nodes_without_a_label_stay_outside_in_their_order() -> None:
    draft = Draft(count=torch.zeros(4))
    x = draft.input("x")
    a = draft.call(torch.sin, x)
    draft.method("add_", draft.attr("count"), a)
    b = draft.call(torch.add, draft.attr("count"), 1.0)
    module = draft.done((b, draft.call(torch.cos, a)))
    program = partita.Program.of(module)
    after = partita.plan(program, ByLabel(by_name({"sin": "a", "cos": "a", "add": "b"}, None)), Call()).apply()
    check(module, after.module(), x4())


def test_a_plan_over_modes_leaves_unlabelled_nodes_in_theirs() -> None:
    for make in (graded, nested_modes, autocast_draft, inferring):
        module = make()
        for odd in (0, 1):
            program = partita.Program.of(module)
            label = in_turn([at if at % 2 == odd else None for at in range(len(operators(module)))])
            after = partita.plan(program, ByLabel(label), Call()).apply()
            check(module, after.module(), torch.ones(4, 4))


def test_equal_results_come_from_equal_calls() -> None:
    module = nested_modes()
    for cut in CUTS.values():
        one, other = cut(module, every(2)), cut(module, every(2))
        assert one.code == other.code
        assert [part.code for part in parts(one).values()] == [part.code for part in parts(other).values()]
