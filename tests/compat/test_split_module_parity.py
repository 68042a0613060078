"""torch's split_module and ours give the same modules, names and code wherever torch's result is right.

Where ours differs on purpose:

| difference | why | test |
|---|---|---|
| an item of a container is taken out where the container is made | tuples do not compile as inputs | test_items_... |
| a part puts back the grad mode that it found | torch's parts leak it | test_a_grad_part_... |
| what a graph leaves switched at its end is switched by the outer graph | no part leaks it | test_a_grad_part_... |
| symbols in meta["val"] cross as in meta["example_value"] | pieces of exports compile | test_val_symbols_... |
| outer calls and items carry the values that they give | later passes read them | test_outer_calls_... |
| keep_original_node_name keeps the targets of inputs | the call signature | test_keeping_names_... |
| the code generator is kept | exported modules return their structure | test_exported_... |
| hooks, training flag and module metadata are kept | they are part of the module | test_split_module_state.py |
| a cycle, a bad callback or a bad graph is a typed error | words that help | test_split_module_bad_input.py |
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compat.split_helpers import GETITEM, Draft, by_name, every, in_turn, operators, parts, same
from tests.helpers.selecting import slow_but
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes import split_module as theirs

from partita.compat import split_module as ours
from partita.errors import CycleError

pytestmark = pytest.mark.skipif(
    "tuple_return" not in inspect.signature(theirs.split_module).parameters,
    reason="the names, order and text are those of the split_module of torch 2.13",
)

FLAGS = ("keep_original_order", "keep_original_node_name", "keep_original_input_name", "tuple_return")
COMBINATIONS = [
    {**dict(zip(FLAGS, ((bits >> at) & 1 == 1 for at in range(4)), strict=True)), "partition_affix": affix}
    for bits in range(16)
    for affix in (None, "pp")
]


class Net(nn.Module):
    """State of every kind that generated graphs name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))
        self.register_buffer("bias", torch.ones(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.block = nn.Module()
        self.block.scale = nn.Parameter(torch.full((4,), 0.5))
        self.block.act = nn.Tanh()


UNARY = (torch.sin, torch.relu, torch.nn.functional.gelu, torch.ops.aten.cos.default)
BINARY = (torch.add, torch.mul, torch.sub, torch.maximum)
METHODS = ("neg", "abs", "sigmoid", "contiguous")
MODULES = ("layers.0", "layers.1", "block.act")
ATTRIBUTES = ("weight", "bias", "block.scale")


def random_graph(seed: int, *, size: int, functions_only: bool = False) -> GraphModule:
    """A graph of `size` operators without effects or containers, with inputs, attributes, modules and dead ends."""
    dice = random.Random(seed)
    torch.manual_seed(0)
    draft = Draft()
    draft.root = Net()
    values = [draft.input(name) for name in ("x", "y", "input", "sin")[: dice.randint(1, 4)]]
    for node in values:
        node.type = dice.choice([None, Tensor])
    made: list[Node] = []
    while len(made) < size:
        kind = dice.choice(("unary", "binary", "binary", "method", "module", "attribute", "keyword"))
        one, other = dice.choice(values[-8:]), dice.choice(values)
        if kind == "binary":
            made.append(draft.call(dice.choice(BINARY), one, other))
        elif kind == "keyword":
            made.append(draft.call(torch.clamp, one, min=-1.0, max=dice.choice([1.0, 2.0])))
        elif kind == "attribute" and not functions_only:
            values.append(draft.attr(dice.choice(ATTRIBUTES)))
            continue
        elif kind == "module" and not functions_only:
            made.append(draft.module(dice.choice(MODULES), one))
        elif kind == "method":
            made.append(draft.method(dice.choice(METHODS), one))
        else:
            made.append(draft.call(dice.choice(UNARY), one))
        values.append(made[-1])
        made[-1].type = dice.choice([None, None, Tensor])
    for node in draft.graph.nodes:
        node.meta["origin"] = node.name
    dice.shuffle(values)
    return draft.done(dice.choice([values[0], tuple(values[:3]), [values[0], {"a": values[-1], "b": None}], made[-1]]))


def labelling(kind: str, seed: int, module: GraphModule) -> dict[str, Any]:
    """A label for each operator by name: at random, in contiguous runs, or never falling along an edge."""
    dice, labels = random.Random(seed), {}
    for at, node in enumerate(operators(module)):
        if kind == "random":
            labels[node.name] = dice.randint(0, 2)
        elif kind == "contiguous":
            labels[node.name] = at // 3
        else:
            before = [labels.get(given.name, 0) for given in node.all_input_nodes]
            labels[node.name] = max([0, *before]) + dice.choice([0, 0, 0, 1])
    if kind == "text":
        labels = {name: "abc"[label % 3] + str(label) for name, label in labels.items()}
    return labels


def described(module: GraphModule) -> dict[str, object]:
    """What must be the same: the tree of modules, names, code, state, inputs and copied metadata."""
    graphs = {"": module, **parts(module)}
    return {
        "modules": sorted(name for name, _ in module.named_modules(remove_duplicate=False)),
        "state": sorted(module.state_dict()),
        "partition_names": module.meta["partition_names"],
        "code": {name: each.code for name, each in graphs.items()},
        "nodes": {name: [(n.op, n.name, str(n.target)) for n in each.graph.nodes] for name, each in graphs.items()},
        "inputs": [(n.target, n.type, n.args) for n in module.graph.find_nodes(op="placeholder")],
        "types": {name: [n.type for n in each.graph.nodes] for name, each in graphs.items()},
        "origins": {
            name: [n.meta.get("origin") for n in each.graph.nodes if n.op != "output"]
            for name, each in graphs.items()
            if name
        },
    }


def with_inputs_called_by_name(make: Callable[[], GraphModule]) -> Callable[[], GraphModule]:
    """Graphs whose inputs have their node names as targets, as torch would make them."""

    def made() -> GraphModule:
        module = copy.deepcopy(make())
        for node in module.graph.find_nodes(op="placeholder"):
            node.target = node.name
        module.recompile()
        return module

    return made


def tried(split: Callable[[], GraphModule], *args: Any) -> tuple[GraphModule | None, Any]:
    """The result and what it gives; nothing where the split or the call fails."""
    try:
        result = split()
        return result, result(*args)
    except Exception as error:
        return None, error


def compare_splits(
    make: Callable[[], GraphModule], labels: dict[str, Any], options: dict[str, Any], *args: Any
) -> bool:
    """Compares both splits of one graph; whether torch's was right, so that there was something to compare."""
    if options.get("keep_original_node_name"):
        make = with_inputs_called_by_name(make)
    module = make()
    wanted = module(*args)
    names: list[dict[str, str]] = [{}, {}]
    label = by_name(labels)
    torchs, given = tried(lambda: theirs.split_module(make(), None, label, names[0], **options), *args)
    try:
        mine = ours.split_module(module, None, label, names[1], **options)
    except CycleError:
        assert torchs is None, "torch splits this"
        return False
    assert same(mine(*args), wanted)
    if torchs is None or not same(given, wanted):
        return False
    left, right = described(torchs), described(mine)
    for key in left:
        assert left[key] == right[key], key
    assert names[0] == names[1]
    return True


@pytest.mark.parametrize("seeds", slow_but([range(30), range(30, 75)], range(30)))
@pytest.mark.parametrize("kind", ["random", "contiguous", "monotone", "text"])
def test_generated_graphs_split_alike(kind: str, seeds: range) -> None:
    compared = 0
    for seed in seeds:
        dice = random.Random(seed)
        size = dice.choice([1, 2, 5, 10, 20])
        graph = random_graph(seed, size=size)
        args = [torch.linspace(-2, 2, 4) + at for at in range(len(graph.graph.find_nodes(op="placeholder")))]
        labels = labelling(kind, seed, graph)
        options = dice.choice(COMBINATIONS) if seed % 2 else {}
        compared += compare_splits(lambda s=seed, n=size: random_graph(s, size=n), labels, options, *args)  # type: ignore[misc]
    assert compared > len(seeds) * (4 if kind == "random" else 10) // 15


@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_every_combination_of_options_gives_the_same(options: dict[str, Any]) -> None:
    compared = 0
    for seed in (3, 14, 15):
        graph = random_graph(seed, size=12)
        args = [torch.linspace(-2, 2, 4) + at for at in range(len(graph.graph.find_nodes(op="placeholder")))]
        for kind in ("contiguous", "monotone"):
            labels = labelling(kind, seed, graph)
            compared += compare_splits(lambda s=seed: random_graph(s, size=12), labels, options, *args)  # type: ignore[misc]
    assert compared >= 2


@pytest.mark.parametrize("affix", [None, "pp"])
def test_simple_splits_of_generated_graphs_are_alike(affix: str | None) -> None:
    compared = 0
    for seed in range(40):
        graph = random_graph(seed, size=random.Random(seed).choice([1, 3, 8, 15]), functions_only=True)
        args = [torch.linspace(-2, 2, 4) + at for at in range(len(graph.graph.find_nodes(op="placeholder")))]
        wanted = graph(*args)
        labels = labelling("contiguous", seed, graph)
        mapping = {node: labels[node.name] for node in operators(graph)}
        mine = ours.split_module_simple(graph, mapping, partition_affix=affix)
        assert same(mine(*args), wanted)
        torchs, given = tried(lambda g=graph, m=mapping: theirs.split_module_simple(g, m, partition_affix=affix), *args)
        if torchs is None or not same(given, wanted):
            continue
        assert list(parts(mine)) == list(parts(torchs))
        assert mine.code == torchs.code
        assert [part.code for part in parts(mine).values()] == [part.code for part in parts(torchs).values()]
        compared += 1
    assert compared > 30


def test_children_and_state_follow_in_torchs_order() -> None:
    compared = 0
    for seed in range(20):
        labels = labelling("contiguous" if seed % 2 else "monotone", seed, random_graph(seed, size=12))
        try:
            torchs = theirs.split_module(random_graph(seed, size=12), None, by_name(labels))
        except RuntimeError:
            continue
        mine = ours.split_module(random_graph(seed, size=12), None, by_name(labels))
        assert [name for name, _ in torchs.named_modules()] == [name for name, _ in mine.named_modules()]
        assert list(torchs.state_dict()) == list(mine.state_dict())
        compared += 1
    assert compared > 10


# Captured models -------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        x = x + self.param
        for block in self.blocks:
            x = x + block(x) * scale
        return self.norm(x).clamp(min=0.0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[0]
        joined = self.qkv(x).view(length, 3, self.heads, 4).permute(1, 2, 0, 3)
        q, k, v = joined.select(0, 0), joined.select(0, 1), joined.select(0, 2)
        attended = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        return self.out(attended.transpose(0, 1).reshape(length, 8)) + x


def compare_captured(
    make: Callable[[], GraphModule], label: Callable[[], Any], options: dict[str, Any], *args: Any
) -> bool:
    module = make()
    given = label()
    return compare_splits(make, {node.name: given(node) for node in operators(module)}, options, *args)


@pytest.mark.parametrize("options", COMBINATIONS[::3], ids=str)
def test_traced_modules_split_alike(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Residual()
    for step in (1, 2, 5):
        assert compare_captured(lambda: symbolic_trace(model), lambda s=step: every(s), options, torch.randn(3, 4))  # type: ignore[misc]


@pytest.mark.parametrize("options", COMBINATIONS[::5], ids=str)
def test_make_fx_graphs_split_alike(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Attention()
    weights = dict(model.named_parameters())

    def forward(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,))

    x = torch.randn(6, 8)
    traced = make_fx(forward)(x)
    for step in (2, 7):
        assert compare_captured(lambda: GraphModule(traced, traced.graph), lambda s=step: every(s), options, x)  # type: ignore[misc]


def dynamo_graph(model: Callable[..., Any], x: Tensor) -> GraphModule:
    found: list[GraphModule] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        found.append(module)
        return module.forward

    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(model, backend=backend, fullgraph=True)(x)
    return found[0]


def test_dynamo_graphs_with_symbols_split_alike() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(6, 8)
    graph = dynamo_graph(model, x)
    inputs = graph.graph.find_nodes(op="placeholder")
    args = [
        dict(model.named_parameters())[
            str(node.target).partition("modules_")[2].replace("_parameters_", ".").strip("_")
        ]
        if "parameters" in str(node.target)
        else (6 if isinstance(node.meta["example_value"], torch.SymInt) else x)
        for node in inputs
    ]
    for step in (2, 3, 7):
        for options in ({}, {"tuple_return": True}, {"keep_original_order": True, "keep_original_node_name": True}):
            assert compare_captured(lambda: graph, lambda s=step: every(s), options, *args)  # type: ignore[misc]


def test_exported_modules_have_the_same_parts() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(6, 8)
    program = torch.export.export(model, (x,), strict=False)
    for step in (2, 3, 7):
        torchs = theirs.split_module(program.module(), None, every(step))
        mine = ours.split_module(program.module(), None, every(step))
        assert torch.equal(mine(x), model(x))
        assert list(parts(torchs)) == list(parts(mine))
        assert [part.code for part in parts(torchs).values()] == [part.code for part in parts(mine).values()]
        assert [n.name for n in torchs.graph.nodes] == [n.name for n in mine.graph.nodes]
        assert list(torchs.state_dict()) == list(mine.state_dict())
        assert torchs.meta["partition_names"] == mine.meta["partition_names"]


# Deliberate differences, each shown ------------------------------------------------------------------------------


def chunked() -> GraphModule:
    draft = Draft()
    x = draft.input("x")
    pieces = draft.call(torch.chunk, x, 2)
    first, second = draft.call(GETITEM, pieces, 0), draft.call(GETITEM, pieces, 1)
    return draft.done(draft.call(torch.add, first, second))


def test_items_are_taken_out_where_the_container_is_made() -> None:
    label = by_name({"chunk": 0}, 1)
    torchs, mine = (each.split_module(chunked(), None, label) for each in (theirs, ours))
    assert [node.name for node in operators(torchs.submod_1)] == ["getitem", "getitem_1", "add"]
    assert [node.name for node in operators(mine.submod_0)] == ["chunk", "getitem", "getitem_1"]
    assert [node.name for node in operators(mine.submod_1)] == ["add"]


def test_items_in_the_part_of_their_container_are_as_torch_has_them() -> None:
    for labels in ({"add": 1}, {}, {"chunk": 0, "getitem": 0, "getitem_1": 0, "add": 1}):
        assert compare_splits(
            chunked, {"chunk": 0, "getitem": 0, "getitem_1": 0, "add": 0, **labels}, {}, torch.arange(4.0)
        )


def graded() -> GraphModule:
    draft = Draft()
    x = draft.input("x")
    a = draft.call(torch.sin, x)
    draft.grad(False)
    b = draft.call(torch.mul, a, a)
    c = draft.call(torch.exp, b)
    draft.grad(True)
    return draft.done(draft.call(torch.add, a, c))


def test_a_grad_part_computes_the_same_and_puts_the_mode_back() -> None:
    labels = [0, 1, 1, 2, 2, 3]
    torchs, mine = (
        each.split_module(graded(), None, in_turn(labels) if each is ours else label_of(labels))
        for each in (theirs, ours)
    )
    x = torch.arange(4.0, requires_grad=True)
    assert same(torchs(x), mine(x))
    assert list(parts(torchs)) == list(parts(mine))
    last = operators(mine)[-1]
    assert (last.target, last.args) == (torch._C._set_grad_enabled, (True,))
    mine.graph.erase_node(last)
    mine.recompile()
    assert torchs.code == mine.code


def label_of(labels: list[int]) -> Callable[[Node], int]:
    """torch asks more than once per node, so it needs a function of the node."""
    given = dict(zip([node.name for node in operators(graded())], labels, strict=True))
    return lambda node: given[node.name]


def autocasted() -> GraphModule:
    draft = Draft()
    x = draft.input("x")
    entered = draft.enter_autocast()
    a = draft.call(torch.matmul, x, x)
    b = draft.call(torch.matmul, a, a)
    draft.exit_autocast(entered)
    return draft.done(draft.call(torch.matmul, b, b))


def test_autocast_parts_compute_the_same_under_the_same_outer_code() -> None:
    for label in (by_name({"matmul_1": 1, "_exit_autocast": 1, "matmul_2": 2}), by_name({"matmul_2": 1})):
        torchs, mine = (each.split_module(autocasted(), None, label) for each in (theirs, ours))
        assert same(torchs(torch.ones(2, 2)), mine(torch.ones(2, 2)))
        assert torchs.code == mine.code
        assert [part.code for part in parts(torchs).values()] == [part.code for part in parts(mine).values()]


def test_outer_calls_carry_values_that_torch_leaves_out() -> None:
    def make() -> GraphModule:
        draft = Draft()
        x = draft.input("x", val=torch.ones(4))
        a = draft.call(torch.sin, x, meta={"val": torch.ones(4)})
        return draft.done(draft.call(torch.cos, a, meta={"val": torch.ones(4)}))

    torchs, mine = (each.split_module(make(), None, by_name({"cos": 1})) for each in (theirs, ours))
    assert ["val" in node.meta for node in operators(torchs)] == [False, False]
    assert ["val" in node.meta for node in operators(mine)] == [True, True]


def test_val_symbols_are_inputs_of_parts_where_torch_forgets_them() -> None:
    graph = make_fx(lambda x: x.sin().cos(), tracing_mode="symbolic")(torch.randn(5, 3))
    torchs, mine = (each.split_module(graph, None, by_name({"cos": 1})) for each in (theirs, ours))
    assert len(torchs.submod_1.graph.find_nodes(op="placeholder")) == 1
    assert len(mine.submod_1.graph.find_nodes(op="placeholder")) == 3
    x = torch.randn(7, 2)
    assert same(mine(x), torchs(x))


def test_keeping_names_keeps_targets_that_torch_renames() -> None:
    def make() -> GraphModule:
        draft = Draft()
        return draft.done(draft.call(torch.sin, draft.input("input")))

    torchs, mine = (
        each.split_module(make(), None, lambda node: 0, keep_original_node_name=True) for each in (theirs, ours)
    )
    assert [node.target for node in torchs.graph.find_nodes(op="placeholder")] == ["input_1"]
    assert [node.target for node in mine.graph.find_nodes(op="placeholder")] == ["input"]


# The rest of torch's module --------------------------------------------------------------------------------------


def test_the_module_has_the_names_and_signatures_of_torchs() -> None:
    import inspect

    assert set(theirs.__all__) <= set(ours.__all__)
    for name in ("split_module", "split_module_simple"):
        wanted, given = (inspect.signature(getattr(each, name)).parameters.values() for each in (theirs, ours))
        assert [(p.name, p.kind, p.default) for p in wanted] == [(p.name, p.kind, p.default) for p in given]


def test_the_partition_record_has_the_fields_and_the_text_of_torchs() -> None:
    torchs, mine = theirs.Partition("7"), ours.Partition("7")
    assert vars(torchs).keys() == vars(mine).keys()
    for each in (torchs, mine):
        each.node_names.append("add")
        each.inputs["x"] = each.dependencies["3"] = None
    assert repr(torchs) == repr(mine)


def test_parts_are_logged_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="partita.compat.split_module"):
        ours.split_module(graded(), None, in_turn([0, 1, 1, 2, 2, 3]))
    assert "partitions depended on" in caplog.text


def test_the_parts_that_modes_reach_are_logged_as_torch_does(caplog: pytest.LogCaptureFixture) -> None:
    def blocks(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.sin()
            z = y.cos()
        with torch.autocast("cpu"):
            return z @ x.tan() @ x

    module = make_fx(blocks, pre_dispatch=True)(torch.ones(2, 2))
    ids = {node: number // 2 for number, node in enumerate(operators(module))}
    shown = []
    for split in (ours, theirs):
        caplog.clear()
        with caplog.at_level("DEBUG", logger=split.__name__):
            split.split_module(module, None, ids.__getitem__)
        shown.append([record.getMessage() for record in caplog.records if "_regions" in record.getMessage()])
    assert shown[0] == shown[1]
    assert "_set_grad_enabled: [0, 1]" in shown[0][1]
