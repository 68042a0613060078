"""ByModule and ByAnnotation: groups that tracers or people wrote down, and the repair of those that are not legal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from tests.policies.helpers import dynamo, exported, exported_strictly, parts
from torch import nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.traceback import annotate, preserve_node_meta

import partita
from partita import Program
from partita.policies import ByAnnotation, ByModule
from partita.treatments import Call


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.inner(x)
        return inner.relu()


class Wide(Block):
    pass


class Stack(nn.Module):
    """Two layers of a list, and a block that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((Block(), Wide()))
        self.twice = Block()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.twice(x) + 1
        normed: torch.Tensor = self.norm(self.twice(self.twice(x)))
        return normed


CAPTURES = pytest.mark.parametrize("capture", [symbolic_trace, exported, exported_strictly, dynamo])
Capture = Callable[[nn.Module], GraphModule]


# ByModule --------------------------------------------------------------------------------------------------------


@CAPTURES
def test_each_module_that_matches_is_a_region(capture: Capture) -> None:
    partition = ByModule("layers.*")(Program.of(capture(Stack())))
    assert [region.name for region in partition] == ["layers_0", "layers_1"]
    assert [region.label for region in partition] == ["layers.0", "layers.1"]
    assert list(map(len, partition)) == [2, 2]
    assert "it runs in no module that the policy selects" in partition.reasons.values()


@CAPTURES
def test_each_call_of_a_module_is_a_region(capture: Capture) -> None:
    partition = ByModule("twice")(Program.of(capture(Stack())))
    assert [region.name for region in partition] == ["twice", "twice_1", "twice_2"]


@CAPTURES
def test_modules_are_chosen_by_class(capture: Capture) -> None:
    program = Program.of(capture(Stack()))
    assert [region.name for region in ByModule(classes=Wide)(program)] == ["layers_1"]
    assert len(ByModule(classes=(Block, nn.LayerNorm))(program)) == 6
    assert len(ByModule("layers.*", classes=("Block", "LayerNorm"))(program)) == 1


@CAPTURES
def test_depth_counts_calls_inwards(capture: Capture) -> None:
    program = Program.of(capture(Stack()))
    assert [region.label for region in ByModule(depth=1)(program)] == [
        *("layers.0", "layers.1", "twice", "twice", "twice", "norm")
    ]
    assert {region.label for region in ByModule(depth=2)(program)} == {
        "layers.0.inner",
        "layers.1.inner",
        "twice.inner",
    }


def test_modules_are_chosen_by_a_function() -> None:
    partition = ByModule(lambda path: path.endswith("inner"))(Program.of(symbolic_trace(Stack())))
    assert len(partition) == 5


def test_calls_without_a_record_are_in_the_modules_that_they_name() -> None:
    traced = symbolic_trace(Stack())
    for node in traced.graph.nodes:
        node.meta.pop("nn_module_stack", None)
    assert [region.name for region in ByModule("layers.?")(Program.of(traced))] == ["layers_0", "layers_1"]


def noted(path: str, kind: type | str = nn.Linear) -> Program:
    """A sine in a module of this path and class."""
    graph = Graph()
    graph.output(graph.call_function(torch.sin, (graph.placeholder("x"),)))
    graph.find_nodes(op="call_function", target=torch.sin)[0].meta["nn_module_stack"] = {"key": (path, kind)}
    return Program.of(GraphModule(nn.Module(), graph))


@pytest.mark.parametrize(
    "path",
    [
        "L['self']._modules['a[b'].0",
        "L['self']['a[b'][0]",
        'G["models"]._modules["a[b"][0]',
        "a[b.0",
        "L['self'].a[b[0]",
    ],
)
def test_items_in_a_path_are_steps(path: str) -> None:
    (region,) = ByModule("a[[]b.0")(noted(path))
    assert region.label == "a[b.0"


class Engine:
    """Something in a program whose property does work."""

    asked = False

    @property
    def connection(self) -> type:
        Engine.asked = True
        return nn.Linear


engine = Engine()


class Lazy(ModuleType):
    """A module that makes what it is asked for."""

    def __getattr__(self, name: str) -> type:
        Engine.asked = True
        return nn.Linear


class Waiting(Lazy):
    """A module that is loaded as soon as it is asked for anything."""

    def __getattribute__(self, name: str) -> object:
        Engine.asked = True
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    "kind", [f"{__name__}.engine.connection", "lazy.Linear", "waiting.Linear", "proxy.Linear", "torch.classes.foo.Bar"]
)
def test_to_look_for_a_class_runs_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (("lazy", Lazy("lazy")), ("waiting", Waiting("waiting")), ("proxy", engine)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Engine, "asked", False)
    assert not ByModule(classes=nn.Linear, allow_empty=True)(noted("layer", kind))
    assert not Engine.asked


class Outer:
    class Inner(nn.Linear):
        pass


@pytest.mark.parametrize("kind", [f"{__name__}.Outer.Inner", "torch.nn.modules.linear.Linear"])
def test_classes_are_found_by_their_names(kind: str) -> None:
    assert len(ByModule(classes=nn.Linear)(noted("layer", kind))) == 1


def test_what_cannot_run_in_one_call_with_its_module_is_left_out() -> None:
    def write(graph: Graph) -> Node:
        x = graph.call_function(torch.sin, (graph.placeholder("x"),))
        x = graph.call_function(torch.cos, (x,))
        outside = graph.call_function(torch.exp, (x,))
        return graph.call_function(torch.tan, (outside,))

    graph = Graph()
    graph.output(write(graph))
    for node in graph.nodes:
        if node.name in ("sin", "cos", "tan"):
            node.meta["nn_module_stack"] = {"layer": ("layer", Block)}
    partition = ByModule("layer")(Program.of(GraphModule(nn.Module(), graph)))
    assert parts(partition) == [["sin", "cos"]]
    assert partition.reasons[partition.program.node("tan")] == (
        "it cannot run in one call with the rest of 'layer': something outside must run in between"
    )


# ByAnnotation ----------------------------------------------------------------------------------------------------


class Annotated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate({"stage": 0}):
            x = x.sin().cos()
        with annotate({"stage": 1, "options": {"mode": "fast"}}):
            x = x.tan()
        return x.exp()


def _by_export(model: nn.Module) -> GraphModule:
    with preserve_node_meta():
        return exported(model)


@pytest.mark.parametrize("capture", [_by_export, dynamo])
def test_nodes_of_one_annotation_form_a_region(capture: Capture) -> None:
    program = Program.of(capture(Annotated()))
    partition = ByAnnotation("stage")(program)
    assert [(region.name, region.label, len(region)) for region in partition] == [("stage_0", 0, 2), ("stage_1", 1, 1)]
    assert "it has no annotation 'stage'" in partition.reasons.values()
    assert [(region.name, region.label) for region in ByAnnotation("options")(program)] == [
        ("options", (("mode", "fast"),))
    ]


def annotated_chain(*values: object) -> Program:
    """A chain in which node `sin_<i>` has the given value under "part"."""
    graph = Graph()
    last = graph.placeholder("x")
    for value in values:
        last = graph.call_function(torch.sin, (last,))
        if value is not None:
            last.meta["part"] = value
    graph.output(last)
    return Program.of(GraphModule(nn.Module(), graph))


def test_equal_annotations_that_need_what_is_between_are_cut() -> None:
    partition = ByAnnotation("part")(annotated_chain("a", None, "a", "b", "a", "a"))
    assert parts(partition) == [["sin"], ["sin_2"], ["sin_3"], ["sin_4", "sin_5"]]
    assert [region.name for region in partition] == ["a", "a_1", "b", "a_2"]


def test_equal_annotations_apart_form_one_region_where_nothing_is_needed_between() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(torch.sin, (x,)) for _ in range(4)]
    for node, value in zip(nodes, ("a", "b", "a", "b"), strict=True):
        node.meta["part"] = value
    graph.output(tuple(nodes))
    partition = ByAnnotation("part")(Program.of(GraphModule(nn.Module(), graph)))
    assert parts(partition) == [["sin", "sin_2"], ["sin_1", "sin_3"]]


def test_equal_annotations_around_an_unmarked_write_are_not_merged_across_it() -> None:
    def write(graph: Graph) -> Node:
        x = graph.placeholder("x")
        buffer = graph.call_function(torch.zeros, (2,))
        before = graph.call_function(torch.sin, (buffer,))
        graph.call_method("add_", (buffer, x))
        after = graph.call_function(torch.cos, (buffer,))
        return graph.call_function(torch.add, (before, after))

    graph = Graph()
    graph.output(write(graph))
    for node in graph.nodes:
        if node.name in ("sin", "cos"):
            node.meta["part"] = "a"
    program = Program.of(GraphModule(nn.Module(), graph))
    plan = partita.plan(program, ByAnnotation("part"), Call())
    assert parts(plan.partition) == [["sin"], ["cos"]]
    partita.verify(program, plan.apply(), (torch.ones(2),))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        (["x"], ["x"], True),
        ({1, 2}, {2, 1}, True),
        (0, False, True),
        ("0", 0, False),
        (bytearray(b"a"), bytearray(b"a"), False),
    ],
)
def test_annotations_are_compared_by_what_they_hold(one: object, other: object, same: bool) -> None:
    assert len(ByAnnotation("part")(annotated_chain(one, other))) == (1 if same else 2)


class Selecting(nn.Module):
    """A size that only data decides, read by a group that needs the group that needs the size."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        early = x.tanh()
        late = x[x > 1].sin().exp()
        return early, late.cos(), torch.zeros(late.size(0))


def test_groups_that_need_each_other_for_a_size_are_cut_into_runs() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    module = torch.export.export(Selecting(), (x,)).module()
    assert isinstance(module, GraphModule)
    groups = {"tanh": "a", "exp": "a", "gt": "b", "index": "b", "sin": "b", "sym_size_int_1": "c", "cos": "c"}
    for node in module.graph.nodes:
        node.meta["part"] = groups.get(node.name)
    plan = partita.plan(Program.of(module), ByAnnotation("part"), Call())
    assert parts(plan.partition) == [["tanh"], ["gt", "index"], ["sym_size_int_1"], ["sin"], ["exp"], ["cos"]]
    for before, after in zip(module(x), plan.apply().module()(x), strict=True):
        assert torch.equal(before, after)
