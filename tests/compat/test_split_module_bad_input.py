"""Bad input gets a typed error that names what is wrong and what would fix it, and the input stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.compat.split_helpers import CUTS, Cut, Draft, ambient, by_name, dump, every, in_turn, operators
from torch import nn
from torch.fx import Graph, GraphModule, Node

import partita
from partita import Partition, Program, Region
from partita.compat.split_module import split_module, split_module_simple
from partita.errors import (
    ArchiveError,
    BrokenGraphError,
    CallbackError,
    CycleError,
    MissingLabelError,
    MissingTargetError,
    ModeError,
    OptionError,
    PartitaError,
    RegionError,
    UnknownNodeError,
)
from partita.policies import ByLabel
from partita.treatments import Call

#: The ways that ask a function; a simple split takes a mapping.
ASKING = {name: cut for name, cut in CUTS.items() if name != "simple"}


@pytest.fixture(params=list(CUTS))
def cut(request: pytest.FixtureRequest) -> Cut:
    return CUTS[request.param]


def diamond() -> GraphModule:
    draft = Draft(weight=nn.Parameter(torch.ones(4)))
    x = draft.input("x")
    a = draft.call(torch.sin, x)
    b = draft.call(torch.cos, a)
    c = draft.call(torch.add, a, b)
    d = draft.call(torch.mul, c, draft.attr("weight"))
    module = draft.done(d)
    for node in module.graph.nodes:
        node.meta["custom"] = {"deep": [node.name]}
    return module


@contextmanager
def refused(module: GraphModule, error: type[PartitaError], *words: str) -> Iterator[None]:
    """The block raises `error` in words that hold all `words`, and leaves the module and the modes as they were."""
    before, modes, answer = dump(module), ambient(), module(torch.ones(4))
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert len(message) > 30
    assert isinstance(caught.value, PartitaError)
    assert dump(module) == before
    assert ambient() == modes
    assert torch.equal(module(torch.ones(4)), answer)


# Regions and partitions ------------------------------------------------------------------------------------------


def nodes_of(module: GraphModule, *names: str) -> tuple[Node, ...]:
    found = {node.name: node for node in module.graph.nodes}
    return tuple(found[name] for name in names)


def test_an_empty_region_is_refused() -> None:
    with refused(diamond(), RegionError, "'lonely'", "empty"):
        Region("lonely", ())


@pytest.mark.parametrize("name", ["x", "output"])
def test_inputs_and_outputs_belong_to_no_region(name: str) -> None:
    module = diamond()
    with refused(module, RegionError, "'greedy'", f"'{name}'"):
        Partition(Program.of(module), [Region("greedy", nodes_of(module, "sin", name))])


def test_overlapping_regions_are_refused() -> None:
    module = diamond()
    with refused(module, RegionError, "'one'", "'other'", "'cos'", "overlap"):
        Partition(
            Program.of(module),
            [Region("one", nodes_of(module, "sin", "cos")), Region("other", nodes_of(module, "cos", "add"))],
        )


def test_a_node_twice_in_one_region_is_refused_or_counted_once() -> None:
    module = diamond()
    with refused(module, RegionError, "'one'", "'cos'"):
        Partition(Program.of(module), [Region("one", nodes_of(module, "sin", "cos", "cos"))])


def test_nodes_of_another_graph_are_refused() -> None:
    module, other = diamond(), diamond()
    with refused(module, RegionError, "'stranger'", "'cos'", "not a node of this program"):
        Partition(Program.of(module), [Region("stranger", nodes_of(other, "cos"))])


def test_an_erased_node_is_refused() -> None:
    module = diamond()
    with module.graph.inserting_before(module.graph.output_node()):
        extra = module.graph.call_function(torch.neg, nodes_of(module, "sin"))
    module.graph.erase_node(extra)
    with refused(module, RegionError, "'ghost'", f"'{extra.name}'"):
        Partition(Program.of(module), [Region("ghost", (extra,))])


def test_two_regions_of_one_name_are_refused() -> None:
    module = diamond()
    with refused(module, RegionError, "'same'"):
        Partition(Program.of(module), [Region("same", nodes_of(module, name)) for name in ("sin", "cos")])


def test_a_partition_of_another_program_is_refused() -> None:
    module = diamond()
    partition = Partition(Program.of(module), [Region("one", nodes_of(module, "sin"))])
    with refused(module, OptionError, "another program"):
        partita.plan(Program.of(diamond()), partition, Call())


# Cycles ----------------------------------------------------------------------------------------------------------


def test_a_cycle_names_its_parts_its_nodes_and_a_repair(cut: Cut) -> None:
    module = diamond()
    with refused(module, CycleError, "cycle exists between partitions!", "sin", "cos", "add", "merge"):
        cut(module, by_name({"cos": 1}))


def test_a_cycle_is_the_runtime_error_that_people_catch() -> None:
    with pytest.raises(RuntimeError, match="cycle exists between partitions!"):
        split_module(diamond(), None, by_name({"cos": 1}))


def test_a_cycle_names_the_shortest_way_round(cut: Cut) -> None:
    draft = Draft()
    value = draft.input("x")
    for _ in range(20):
        value = draft.call(torch.sin, value)
    module = draft.done(value)
    labels = {node.name: at for at, node in enumerate(operators(module))}
    labels["sin_10"] = labels["sin_12"] = 99
    with refused(module, CycleError, "sin_10", "sin_11", "sin_12"):
        cut(module, by_name(labels))
    with pytest.raises(CycleError) as caught:
        cut(module, by_name(labels))
    assert "sin_3" not in str(caught.value)


def test_a_cycle_through_memory_is_refused_with_its_nodes(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    y = draft.call(torch.mul, x, 1.0)
    early = draft.call(torch.sin, y)
    draft.method("add_", y, early)
    module = draft.done(draft.call(torch.cos, y))
    with refused(module, CycleError, "add_", "merge"):
        cut(module, by_name({"add_": 1, "mul": 0, "sin": 0, "cos": 0}))


def test_regions_that_are_legal_one_by_one_but_not_together_are_refused() -> None:
    draft = Draft()
    x = draft.input("x")
    a, b = draft.call(torch.sin, x), draft.call(torch.cos, x)
    c, d = draft.call(torch.neg, a), draft.call(torch.abs, b)
    module = draft.done(draft.call(torch.add, c, d))
    program = Program.of(module)
    one, other = Region("one", nodes_of(module, "sin", "abs_1")), Region("other", nodes_of(module, "cos", "neg"))
    for region in (one, other):
        assert len(Partition(program, [region])) == 1
    with refused(module, CycleError, "'one'", "'other'", "sin", "neg", "cos", "abs_1"):
        Partition(program, [one, other])


def test_a_region_around_an_excluded_node_is_refused_with_that_node() -> None:
    module = diamond()
    with refused(module, CycleError, "'a'", "'cos'", "add"):
        partita.plan(Program.of(module), ByLabel(by_name({"cos": None}, "a")), Call())


# Callbacks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ASKING.values(), ids=ASKING)
def test_a_callback_that_raises_is_named_with_its_node(cut: Cut) -> None:
    def label(node: Node) -> int:
        if node.name == "add":
            raise KeyError("no stage for it")
        return 0

    module = diamond()
    with refused(module, CallbackError, "'add'", "KeyError", "no stage for it"):
        cut(module, label)


def test_the_error_of_a_callback_is_the_cause() -> None:
    def label(node: Node) -> int:
        raise ZeroDivisionError

    with pytest.raises(CallbackError) as caught:
        split_module(diamond(), None, label)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_keyboard_interrupt_in_a_callback_is_passed_on(cut: Cut) -> None:
    def label(node: Node) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut(diamond(), label)


def test_a_callback_that_gives_none_is_named_with_its_node() -> None:
    module = diamond()
    with refused(module, CallbackError, "'cos'", "None"):
        split_module(module, None, by_name({"cos": None}))


@pytest.mark.parametrize("label", [[1], {"a": 1}, {1, 2}], ids=str)
def test_a_label_without_a_hash_is_refused_or_taken_as_its_text(cut: Cut, label: Any) -> None:
    module, refusal = diamond(), None
    try:
        result = cut(module, lambda node: label)
    except CallbackError as error:
        refusal = str(error)
    if refusal is not None:
        assert "'sin'" in refusal
        return
    assert torch.equal(result(torch.ones(4)), module(torch.ones(4)))


def test_a_simple_split_with_none_for_a_node_is_refused() -> None:
    module = diamond()
    with refused(module, CallbackError, "'cos'"):
        split_module_simple(module, {node: None if node.name == "cos" else 0 for node in operators(module)})  # type: ignore[misc]


def test_a_simple_split_without_an_id_for_a_node_is_refused() -> None:
    module = diamond()
    with refused(module, MissingLabelError, "'cos'", "'mul'"):
        split_module_simple(module, {node: 0 for node in operators(module) if node.name not in ("cos", "mul")})
    with pytest.raises(KeyError):
        split_module_simple(module, {})


@pytest.mark.parametrize("cut", ASKING.values(), ids=ASKING)
def test_a_callback_that_is_no_function_is_refused(cut: Cut) -> None:
    module = diamond()
    with refused(module, PartitaError):
        cut(module, "stage")  # type: ignore[arg-type]


def test_a_simple_split_by_something_that_is_no_mapping_is_refused() -> None:
    module = diamond()
    with refused(module, PartitaError):
        split_module_simple(module, lambda node: 0)  # type: ignore[arg-type]


def test_a_qualname_map_is_not_half_filled_by_a_failed_split() -> None:
    draft = Draft(act=nn.Tanh())
    x = draft.input("x")
    a = draft.module("act", x)
    b = draft.call(torch.cos, a)
    module = draft.done(draft.call(torch.add, a, b))
    names: dict[str, str] = {"kept": "as it was"}
    with refused(module, CycleError):
        split_module(module, None, by_name({"cos": 1}), names)
    assert names == {"kept": "as it was"}


# Broken graphs ---------------------------------------------------------------------------------------------------


def broken(change: Callable[[Graph, dict[str, Node]], None]) -> GraphModule:
    """A module whose graph was broken after it was built."""
    module = diamond()
    change(module.graph, {node.name: node for node in module.graph.nodes})
    return module


def _reads_stranger(graph: Graph, nodes: dict[str, Node]) -> None:
    other = {node.name: node for node in diamond().graph.nodes}
    nodes["cos"].args = (other["sin"],)


def _reads_later(graph: Graph, nodes: dict[str, Node]) -> None:
    nodes["cos"].args = (nodes["mul"],)


def _has_no_output(graph: Graph, nodes: dict[str, Node]) -> None:
    graph.erase_node(nodes["output"])


def _reads_itself(graph: Graph, nodes: dict[str, Node]) -> None:
    nodes["cos"].args = (nodes["cos"],)


def _has_two_outputs(graph: Graph, nodes: dict[str, Node]) -> None:
    with graph.inserting_before(nodes["mul"]):
        graph.create_node("output", "output", (nodes["add"],))


def _has_a_late_input(graph: Graph, nodes: dict[str, Node]) -> None:
    with graph.inserting_before(nodes["mul"]):
        graph.placeholder("late")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_reads_stranger, ("'cos'", "'sin'")),
        (_reads_later, ("'cos'", "'mul'")),
        (_has_no_output, ("output",)),
        (_reads_itself, ("'cos'",)),
        (_has_two_outputs, ("output",)),
    ],
)
def test_a_broken_graph_is_refused_by_name(cut: Cut, change: Any, words: tuple[str, ...]) -> None:
    module = broken(change)
    before = [(node.name, str(node.args), node.meta["custom"]) for node in module.graph.nodes if "custom" in node.meta]
    with pytest.raises(BrokenGraphError) as caught:
        cut(module, every(2))
    assert [word for word in words if word not in str(caught.value)] == []
    after = [(node.name, str(node.args), node.meta["custom"]) for node in module.graph.nodes if "custom" in node.meta]
    assert before == after


def test_a_late_input_is_handled_or_refused(cut: Cut) -> None:
    module = broken(_has_a_late_input)
    module.recompile()
    refusal = None
    try:
        result = cut(module, every(2))
    except BrokenGraphError as error:
        refusal = str(error)
    if refusal is not None:
        assert "late" in refusal
        return
    assert torch.equal(result(torch.ones(4), None), module(torch.ones(4), None))


@pytest.mark.parametrize("kind", ["get_attr", "call_module", "nested get_attr", "nested call_module"])
def test_a_missing_target_is_refused_by_name(cut: Cut, kind: str) -> None:
    module = diamond()
    target = "layers.missing" if "nested" in kind else "missing"
    with module.graph.inserting_before(nodes_of(module, "mul")[0]):
        node = module.graph.create_node(kind.split()[-1], target, () if "get_attr" in kind else nodes_of(module, "sin"))
        module.graph.call_function(torch.add, (node, 1))
    before = [(node.name, str(node.args), str(node.meta)) for node in module.graph.nodes]
    with pytest.raises(MissingTargetError, match="missing") as caught:
        cut(module, lambda node: 0)
    assert isinstance(caught.value, AttributeError)
    assert f"Node target {target} not found!" in str(caught.value)
    assert node.name in str(caught.value)
    assert before == [(node.name, str(node.args), str(node.meta)) for node in module.graph.nodes]


def test_a_call_of_something_that_is_no_module_is_refused(cut: Cut) -> None:
    module = diamond()
    with module.graph.inserting_before(nodes_of(module, "mul")[0]):
        module.graph.create_node("call_module", "weight", nodes_of(module, "sin"))
    with pytest.raises(BrokenGraphError, match="weight"):
        cut(module, lambda node: 0)


@pytest.mark.parametrize("source", [nn.Linear(2, 2), torch.sin, None, "model.pt"])
def test_only_a_graph_module_can_be_split(source: Any) -> None:
    with pytest.raises(ArchiveError if source == "model.pt" else OptionError, match=r"GraphModule|no file"):
        Program.of(source)
    with pytest.raises(OptionError, match="GraphModule"):
        split_module(source, None, lambda node: 0)
    with pytest.raises(OptionError, match="GraphModule"):
        split_module_simple(source, {})


# Modes -----------------------------------------------------------------------------------------------------------


def test_a_grad_toggle_by_a_value_is_refused_by_name(cut: Cut) -> None:
    draft = Draft()
    x, flag = draft.input("x"), draft.input("flag", True)
    draft.grad(flag)
    module = draft.done(draft.call(torch.sin, x))
    with refused(module, ModeError, "_set_grad_enabled", "constant"):
        cut(module, every(1))


def test_a_grad_toggle_without_arguments_is_refused_by_name(cut: Cut) -> None:
    draft = Draft()
    x = draft.input("x")
    y = draft.call(torch.sin, x)
    node = draft.grad(True)
    module = draft.done(y)
    node.args = ()
    with pytest.raises(ModeError, match="_set_grad_enabled"):
        cut(module, every(1))


@pytest.mark.parametrize("at", range(4))
def test_an_autocast_by_a_value_is_refused_by_name(cut: Cut, at: int) -> None:
    draft = Draft()
    x, value = draft.input("x"), draft.input("value", None)
    entered = draft.enter_autocast()
    y = draft.call(torch.sin, x)
    draft.exit_autocast(entered)
    module = draft.done(y)
    answer = dump(module)
    arguments: list[Any] = ["cpu", torch.bfloat16, True, None]
    arguments[at] = value
    entered.args = tuple(arguments)
    with pytest.raises(ModeError, match="_enter_autocast"):
        cut(module, every(1))
    entered.args = ("cpu", torch.bfloat16, True, None)
    assert [entry[1] for entry in answer[0]] == [node.name for node in module.graph.nodes]  # type: ignore[attr-defined]


def test_an_inference_block_by_a_value_is_refused_by_name(cut: Cut) -> None:
    draft = Draft()
    x, flag = draft.input("x"), draft.input("flag", True)
    entered = draft.enter_inference()
    y = draft.call(torch.sin, x)
    draft.exit_inference(entered)
    module = draft.done(y)
    entered.args = (flag,)
    with pytest.raises(ModeError, match="_enter_inference_mode"):
        cut(module, every(1))


@pytest.mark.parametrize("kind", ["autocast", "inference"])
def test_a_block_that_is_left_twice_is_refused_by_name(cut: Cut, kind: str) -> None:
    draft = Draft()
    x = draft.input("x")
    entered = getattr(draft, f"enter_{kind}")()
    y = draft.call(torch.sin, x)
    leave = getattr(draft, f"exit_{kind}")
    leave(entered)
    second = leave(entered)
    module = draft.done(y)
    with pytest.raises(ModeError, match=second.name):
        cut(module, every(1))


@pytest.mark.parametrize("kind", ["autocast", "inference"])
def test_a_block_that_is_left_but_never_entered_is_refused_by_name(cut: Cut, kind: str) -> None:
    draft = Draft()
    x = draft.input("x")
    left = getattr(draft, f"exit_{kind}")(x)
    module = draft.done(draft.call(torch.sin, x))
    with pytest.raises(ModeError, match=left.name):
        cut(module, every(1))


# Plans -----------------------------------------------------------------------------------------------------------


def test_a_policy_that_gives_no_partition_is_refused() -> None:
    module = diamond()
    with refused(module, OptionError, "Partition", "list"):
        partita.plan(Program.of(module), lambda program: [], Call())  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("treatment", [None, {}, {"part_0": None}, lambda region: None])
def test_a_region_without_a_treatment_is_refused_by_name(treatment: Any) -> None:
    module = diamond()
    with refused(module, PartitaError, "'part_0'"):
        partita.plan(Program.of(module), ByLabel(lambda node: 0), treatment)


def test_a_node_that_does_not_exist_is_refused_with_near_names() -> None:
    module = diamond()
    plan = partita.plan(Program.of(module), ByLabel(lambda node: 0), Call())
    with refused(module, UnknownNodeError, "'sinn'", "'sin'"):
        plan.explain("sinn")


def test_a_node_of_another_program_cannot_be_explained() -> None:
    module = diamond()
    plan = partita.plan(Program.of(module), ByLabel(lambda node: 0), Call())
    with refused(module, UnknownNodeError, "cos"):
        plan.explain(nodes_of(diamond(), "cos")[0])


def test_an_unknown_way_of_naming_state_is_refused() -> None:
    module = diamond()
    plan = partita.plan(Program.of(module), ByLabel(lambda node: 0), Call())
    with refused(module, OptionError, "state_names", "'other'"):
        plan.apply(state_names="other")  # type: ignore[arg-type]


def test_a_split_works_after_one_that_failed(cut: Cut) -> None:
    module = diamond()
    with pytest.raises(CycleError):
        cut(module, by_name({"cos": 1}))
    assert torch.equal(cut(module, in_turn([0, 1, 2, 3]))(torch.ones(4)), module(torch.ones(4)))
