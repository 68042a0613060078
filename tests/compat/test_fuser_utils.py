"""`compat.fuser_utils` against torch's own: the same text wherever torch is right, and right where it is not.

Where ours differs on purpose:

| difference | why |
|---|---|
| the inputs of a body come first | torch writes them where they are first read |
| effects and modes count as dependencies | torch moves reads past writes, and nodes out of their mode |
| all is checked before anything is changed | torch stops half way |
| a read of a body of an operator moves inside | torch passes a module to a call |
| numbering goes on after the modules of an earlier run | torch overwrites them |
| a body trains as its module does | torch's always trains |
| after `insert_subgm` the graph is in order | torch's callers sort it |
"""

from __future__ import annotations

import copy
import inspect
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.compat.fuser_helpers import described, fused_modules, named
from tests.compat.split_helpers import Draft, ambient, dump, same
from tests.compat.test_split_module_parity import random_graph
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.export import _swap
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.fx.passes.utils import fuser_utils as theirs

from partita import Program, compare
from partita.compat import fuser_utils as ours
from partita.errors import BrokenGraphError, CycleError, ModeError, OptionError, RegionError
from partita.testing import Case, Labels, labelled_programs

X = torch.linspace(-2, 2, 4)
AS_IN_TORCH_2_13 = pytest.mark.skipif(
    "insertion_point" not in inspect.signature(theirs.insert_subgm).parameters,
    reason="the order is that of torch 2.13",
)


def partitions(module: GraphModule, seed: int, *, attributes: bool) -> list[list[str]]:
    """Groups of nodes by name, out of order: runs of the graph, or levels that never fall along an edge."""
    dice, labels = random.Random(seed), dict[str, int]()
    nodes = [
        node for node in module.graph.nodes if node.op.startswith("call_") or (attributes and node.op == "get_attr")
    ]
    size, by_level = dice.choice([2, 3, 5]), dice.random() < 0.5
    for at, node in enumerate(nodes):
        before = max([0, *(labels.get(read.name, 0) for read in node.all_input_nodes)])
        labels[node.name] = before + dice.choice([0, 0, 0, 1]) if by_level else at // size
    skipped = dice.choice([0, 2, 3])
    groups: dict[int, list[str]] = {}
    for name, group in labels.items():
        if not skipped or group % skipped:
            groups.setdefault(group, []).append(name)
    for group in groups.values():
        dice.shuffle(group)
    return list(groups.values())


def fused(module: GraphModule, groups: list[list[str]], **options: Any) -> GraphModule:
    return ours.fuse_by_partitions(module, [dict.fromkeys(named(module, group)) for group in groups], **options)


def chain(*, training: bool = True) -> GraphModule:
    """x -> sin -> cos -> tan -> relu."""
    draft = Draft()
    value = draft.input("x")
    for function in (torch.sin, torch.cos, torch.tan, torch.relu):
        value = draft.call(function, value)
    return draft.done(value).train(training)


# As torch does it --------------------------------------------------------------------------------------------------


@AS_IN_TORCH_2_13
def test_the_signatures_are_torchs() -> None:
    for name in ours.__all__:
        mine, other = inspect.signature(getattr(ours, name)), inspect.signature(getattr(theirs, name))
        assert list(mine.parameters) == list(other.parameters)


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("always_return_tuple", [False, True])
@pytest.mark.parametrize("attributes", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_fusing_gives_what_torch_gives(seed: int, attributes: bool, always_return_tuple: bool) -> None:
    size = 8 + seed % 13
    mine, other = (random_graph(seed, size=size) for _ in range(2))
    groups = partitions(mine, seed, attributes=attributes)
    before = dump(mine)
    try:
        given = [dict.fromkeys(named(other, group)) for group in groups]
        theirs.fuse_by_partitions(other, given, always_return_tuple=always_return_tuple)
    except AssertionError as error:
        with pytest.raises(AssertionError, match=str(error).split(":")[0]):
            fused(mine, groups, always_return_tuple=always_return_tuple)
        assert dump(mine) == before
        return
    inputs = (X,) * len(mine.graph.find_nodes(op="placeholder"))
    expected = mine(*inputs)
    assert fused(mine, groups, always_return_tuple=always_return_tuple) is mine
    assert described(mine) == described(other)
    assert same(mine(*inputs), expected)


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("seed", range(20))
def test_sorting_and_validating_chosen_nodes_gives_what_torch_gives(seed: int) -> None:
    module, dice = random_graph(seed, size=20), random.Random(seed)
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    chosen = dice.sample(nodes, dice.randint(1, len(nodes)))
    assert ours.topo_sort(chosen) == theirs.topo_sort(chosen)
    close = nodes[seed % 10 :][: dice.randint(2, 6)]
    for partition in (chosen, close, nodes, [dice.choice(nodes)], []):
        assert ours.validate_partition(partition) is theirs.validate_partition(partition)


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("seed", range(10))
def test_a_body_by_itself_is_torchs(seed: int) -> None:
    module = random_graph(seed, size=12)
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")][3:9]
    if not theirs.validate_partition(nodes):
        pytest.skip("these nodes cannot run in one call")
    before = dump(module)
    for flag in (False, True):
        mine = ours.fuse_as_graphmodule(module, nodes, "Body", dict.fromkeys(nodes), always_return_tuple=flag)
        other = theirs.fuse_as_graphmodule(module, nodes, "Body", dict.fromkeys(nodes), always_return_tuple=flag)
        assert mine[1:] == other[1:]
        assert described(mine[0]) == described(other[0])
        assert type(mine[0]).__name__ == "Body"
    assert dump(module) == before


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("names", [("sin", "cos"), ("cos", "tan"), ("relu",)])
def test_inserting_and_erasing_by_hand_gives_what_torch_gives(names: tuple[str, ...]) -> None:
    results = []
    for utils in (ours, theirs):
        module = chain()
        nodes = named(module, names)
        body, inputs, outputs = utils.fuse_as_graphmodule(module, nodes, "Body")  # type: ignore[attr-defined]
        assert utils.insert_subgm(module, body, inputs, outputs, nodes[-1]) is module  # type: ignore[attr-defined]
        utils.erase_nodes(module, nodes)  # type: ignore[attr-defined]
        module.graph.lint()
        module.recompile()
        results.append(module)
    assert results[0].code == results[1].code
    assert same(results[0](X), chain()(X))


@AS_IN_TORCH_2_13
def test_traced_values_follow_as_torchs() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = torch.topk(x.sin(), 2)
        return values.cos() + 1, places

    results = []
    for utils in (ours, theirs):
        module = make_fx(function, tracing_mode="fake")(X)
        nodes = [node for node in module.graph.nodes if node.op == "call_function"]
        results.append(utils.fuse_by_partitions(module, [dict.fromkeys(nodes[:2]), dict.fromkeys(nodes[2:])]))  # type: ignore[attr-defined]
    mine, other = map(described, results)
    assert mine == other
    call = results[0].graph.find_nodes(op="call_module")[1]
    assert [value.shape for value in call.meta["val"]] == [(2,), (2,)]


def test_a_name_of_the_new_nodes_never_collides() -> None:
    draft = Draft()
    x = draft.input("fused_0")
    pair = draft.call(torch.topk, x, 2)
    getitem = draft.call(operator.getitem, pair, 0)
    left, right = draft.call(torch.sin, getitem), draft.call(torch.cos, getitem)
    module = draft.done((left, right))
    expected = module(X)
    fused(module, [["sin", "cos"]])
    names = [node.name for node in module.graph.nodes]
    assert len(set(names)) == len(names)
    assert same(module(X), expected)


# Groups that torch gets wrong ----------------------------------------------------------------------------------------


def test_an_empty_partition_is_passed_over() -> None:
    module = chain()
    ours.fuse_by_partitions(module, [{}, dict.fromkeys(named(module, ["sin", "cos"])), []])
    assert list(fused_modules(module)) == ["fused_1"]
    assert same(module(X), chain()(X))


def test_nothing_to_fuse_changes_nothing() -> None:
    module = chain()
    before = dump(module)
    assert ours.fuse_by_partitions(module, []) is module
    assert ours.fuse_by_partitions(module, [{}, []]) is module
    assert dump(module) == before


def test_partitions_may_be_lists_tuples_or_sets() -> None:
    expected = fused(chain(), [["cos", "tan"]]).code
    for kind in (list, tuple, set, frozenset):
        module = chain()
        assert ours.fuse_by_partitions(module, (kind(named(module, ["cos", "tan"])),)).code == expected


def cond_module() -> GraphModule:
    """x -> sin -> cond(two bodies) -> cos."""
    draft = Draft(high=symbolic_trace(lambda x: (x.sin(),)), low=symbolic_trace(lambda x: (x.cos(),)))
    x = draft.input("x")
    high, low = draft.attr("high"), draft.attr("low")
    first = draft.call(torch.sin, x)
    pair = draft.call(torch.ops.higher_order.cond, True, high, low, [first])
    item = draft.call(operator.getitem, pair, 0)
    return draft.done(draft.call(torch.cos, item))


@pytest.mark.parametrize("with_bodies", [False, True])
def test_a_body_of_an_operator_moves_into_the_fused_module(with_bodies: bool) -> None:
    module = cond_module()
    expected = module(X)
    fused(module, [[*(("high", "low") if with_bodies else ()), "sin", "cond", "getitem"]])
    (body,) = fused_modules(module).values()
    assert [node.name for node in body.graph.find_nodes(op="placeholder")] == ["x"]
    assert body.high is module.high
    assert body.low is module.low
    assert not module.graph.find_nodes(op="get_attr")
    assert same(module(X), expected)


def test_a_body_that_operators_on_both_sides_run_is_read_on_both() -> None:
    draft = Draft(body=symbolic_trace(lambda x: (x.sin(),)))
    x, body = draft.input("x"), draft.attr("body")
    cond = torch.ops.higher_order.cond
    one = draft.call(operator.getitem, draft.call(cond, True, body, body, [x]), 0)
    two = draft.call(operator.getitem, draft.call(cond, True, body, body, [one]), 0)
    module = draft.done(two)
    expected = module(X)
    fused(module, [["body", "cond", "getitem"]])
    assert [node.name for node in module.graph.find_nodes(op="get_attr")] == ["body"]
    assert [node.name for node in fused_modules(module)["fused_0"].graph.find_nodes(op="get_attr")] == ["body"]
    assert same(module(X), expected)


def test_a_second_run_does_not_overwrite_the_modules_of_the_first() -> None:
    module = chain()
    expected = module(X)
    fused(module, [["sin"], ["cos"]])
    first = fused_modules(module)
    fused(module, [["tan"], ["relu"]])
    assert list(fused_modules(module)) == ["fused_0", "fused_1", "fused_2", "fused_3"]
    assert all(fused_modules(module)[name] is body for name, body in first.items())
    assert same(module(X), expected)
    fused(module, [["fused_0", "fused_1"]])
    assert same(module(X), expected)


def test_a_name_that_something_else_has_is_not_taken() -> None:
    module = chain()
    module.register_buffer("fused_1", torch.ones(1))
    fused(module, [["sin"]])
    assert list(fused_modules(module)) == ["fused_0"]
    module = chain()
    module.fused_0 = "mine"
    fused(module, [["sin"], ["cos"]], prefix="fused_")
    assert list(fused_modules(module)) == ["fused_1", "fused_2"]
    assert module.fused_0 == "mine"


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).relu().tanh()


@pytest.mark.parametrize(("folder", "held"), [("weight", "Parameter"), ("forward", "method"), ("deep.er", None)])
def test_a_prefix_leads_through_modules_or_nothing_is_fused(folder: str, held: str | None) -> None:
    module = symbolic_trace(Weighted())
    code, groups = module.code, [["mul", "relu"], ["tanh"]]
    if held is None:
        fused(module, groups, prefix=f"{folder}.fused_")
        assert module.get_submodule(f"{folder}.fused_1") is not None
    else:
        with pytest.raises(OptionError, match=rf"put modules into '{folder}', which is no module but of type {held}"):
            fused(module, groups, prefix=f"{folder}.fused_")
        assert module.code == code
    assert torch.equal(module(X), (X * module.weight).relu().tanh())


def test_a_body_trains_as_its_module_does() -> None:
    for training in (True, False):
        module = chain(training=training)
        fused(module, [["sin", "cos"]])
        assert module.fused_0.training is training


# Effects ---------------------------------------------------------------------------------------------------------


def written_between() -> GraphModule:
    """Reads of x before and after it is written, none of which the data orders."""
    draft = Draft()
    x = draft.input("x")
    before = draft.call(torch.sin, x)
    draft.method("add_", x, 1.0)
    after = draft.call(torch.cos, x)
    return draft.done((before, after))


def test_reads_on_both_sides_of_a_write_cannot_be_fused() -> None:
    module = written_between()
    nodes = named(module, ["sin", "cos"])
    assert theirs.validate_partition(nodes)
    assert not ours.validate_partition(nodes)
    before = dump(module)
    with pytest.raises(AssertionError, match=r"Invalid partition, found dependency cycles.*by their effects"):
        ours.fuse_by_partitions(module, [nodes])
    with pytest.raises(CycleError, match="Invalid partition, found dependency cycles"):
        ours.fuse_as_graphmodule(module, nodes, "Body")
    assert dump(module) == before


def test_a_mutation_keeps_its_place_in_a_body_that_is_passed_out_of_order() -> None:
    module = written_between()
    nodes = named(module, ["cos", "add_", "sin"])
    assert [node.name for node in ours.topo_sort(nodes)] == ["sin", "add_", "cos"]
    expected = module(X.clone())
    ours.fuse_by_partitions(module, [nodes])
    assert same(module(X.clone()), expected)


def test_random_operators_keep_their_order() -> None:
    draft = Draft()
    x = draft.input("x")
    draws = [draft.call(torch.rand_like, x) for _ in range(3)]
    module = draft.done(tuple(draws))
    assert not ours.validate_partition([draws[0], draws[2]])
    ours.fuse_by_partitions(module, [[draws[1], draws[0]]])
    torch.manual_seed(3)
    found = module(X)
    torch.manual_seed(3)
    assert same(found, tuple(torch.rand_like(X) for _ in range(3)))


def test_a_call_that_only_writes_survives_the_elimination_of_dead_code() -> None:
    draft = Draft()
    x = draft.input("x")
    draft.method("add_", x, 1.0)
    module = draft.done(x)
    ours.fuse_by_partitions(module, [named(module, ["add_"])])
    module.graph.eliminate_dead_code()
    module.recompile()
    assert same(module(X.clone()), X + 1)


@given(labelled_programs(max_nodes=20))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_fused_program_means_the_same_or_is_refused_whole(labelled: tuple[Case, Labels]) -> None:
    case, labels = labelled
    module = case.copy().graph_module
    groups: dict[Any, list[Node]] = {}
    for node in module.graph.nodes:
        if node.op.startswith("call_") and labels.get(node.name) is not None:
            groups.setdefault(labels[node.name], []).append(node)
    before = dump(module)
    try:
        ours.fuse_by_partitions(module, list(groups.values()))
    except CycleError:
        assert dump(module) == before
        return
    module.graph.lint()
    program = Program.of(case.graph_module)
    comparison = compare(program, module, case.args, case.kwargs, tolerance=_sums(program))
    assert comparison.equal, str(comparison)


def _sums(program: Program) -> Any:
    from partita.program.program import summation_tolerance

    return summation_tolerance(program)


# Modes -----------------------------------------------------------------------------------------------------------


def with_block() -> GraphModule:
    """sin and cos outside, tan and relu inside of no_grad."""
    draft = Draft()
    x = draft.input("x")
    one = draft.call(torch.sin, x)
    draft.grad(False)
    two = draft.call(torch.tan, x)
    three = draft.call(torch.relu, two)
    draft.grad(True)
    four = draft.call(torch.cos, x)
    return draft.done((one, three, four))


@pytest.mark.parametrize(
    "groups",
    [
        [["tan", "relu"]],
        [["sin", "cos"]],
        [["sin", "cos"], ["tan", "relu"]],
        [["sin", "tan"], ["relu", "cos"]],
        [["sin", "_set_grad_enabled", "tan", "relu", "_set_grad_enabled_1", "cos"]],
        [["_set_grad_enabled"], ["tan", "_set_grad_enabled_1"]],
    ],
)
def test_every_node_keeps_its_mode(groups: list[list[str]]) -> None:
    module = with_block()
    x = X.clone().requires_grad_()
    expected, before = module(x), ambient()
    fused(module, groups)
    assert same(module(x), expected)
    assert ambient() == before
    assert [value.requires_grad for value in module(x)] == [True, False, True]


def test_a_body_of_one_mode_holds_no_toggles() -> None:
    module = with_block()
    fused(module, [["tan", "relu"]])
    assert [node.name for node in module.fused_0.graph.nodes] == ["x", "tan", "relu", "output"]


def test_nodes_of_two_modes_have_no_body_of_their_own() -> None:
    module = with_block()
    for names in (["sin", "tan"], ["_set_grad_enabled", "tan"]):
        with pytest.raises(ModeError, match="several modes"):
            ours.fuse_as_graphmodule(module, named(module, names), "Body")
    assert ours.fuse_as_graphmodule(module, named(module, ["tan", "relu"]), "Body")[1] == (named(module, ["x"])[0],)


# Done or untouched -------------------------------------------------------------------------------------------------


def needing_each_other() -> GraphModule:
    draft = Draft()
    x, y = draft.input("x"), draft.input("y")
    one, two = draft.call(torch.sin, x), draft.call(torch.cos, y)
    three, four = draft.call(torch.add, two, 1), draft.call(torch.mul, one, 2)
    return draft.done((three, four))


def test_partitions_that_need_each_other_are_refused_before_anything_is_fused() -> None:
    module = needing_each_other()
    before = dump(module)
    with pytest.raises(AssertionError, match=r"Invalid partition, found dependency cycles.*'fused_0'.*'fused_1'"):
        fused(module, [["sin", "add"], ["cos", "mul"]])
    assert dump(module) == before


@pytest.mark.parametrize(
    ("choose", "phrase"),
    [
        (lambda module: [[module.graph.output_node()]], "the output of a graph cannot be fused"),
        (lambda module: [named(module, ["sin"]), named(module, ["sin"])], "has been removed from owning graph"),
        (lambda module: [named(module, ["sin", "sin"])], "holds 'sin' twice"),
        (lambda module: [named(chain(), ["sin"])], "doesn't belong to passed in graph module"),
        (lambda module: [["sin"]], "which is no node"),
        (lambda module: named(module, ["sin"]), "is a collection of nodes"),
        (lambda module: [None], "is a collection of nodes"),
    ],
)
def test_what_cannot_be_fused_is_named_and_nothing_is_changed(
    choose: Callable[[GraphModule], Any], phrase: str
) -> None:
    module = chain()
    before = dump(module)
    for kind in (AssertionError, RegionError):
        with pytest.raises(kind, match=phrase):
            ours.fuse_by_partitions(module, choose(module))
    assert dump(module) == before


def test_nodes_from_before_the_last_change_are_refused() -> None:
    module = chain()
    sin, cos = named(module, ["sin", "cos"])
    fused(module, [["tan"]])
    with pytest.raises(AssertionError, match="is not found in graph module"):
        ours.fuse_by_partitions(module, [[sin, cos]])
    erased = module.graph.call_function(torch.sin, ())
    module.graph.erase_node(erased)
    with pytest.raises(AssertionError, match="has been removed from owning graph"):
        ours.fuse_by_partitions(module, [[erased]])


def test_only_graph_modules_are_fused_in() -> None:
    with pytest.raises(OptionError, match=r"torch\.fx\.GraphModule, not Linear"):
        ours.fuse_by_partitions(nn.Linear(2, 2), [])  # type: ignore[arg-type]


class FailingCode(CodeGen):
    """Generates no code for graphs that call a fused module."""

    def _gen_python_code(self, nodes: Any, *args: Any, **kwargs: Any) -> Any:
        if any(str(node.target).startswith("fused_") for node in nodes):
            raise RuntimeError("no code")
        return super()._gen_python_code(nodes, *args, **kwargs)


def test_a_graph_without_code_leaves_the_module_as_it_was() -> None:
    module = chain()
    module.graph.set_codegen(FailingCode())
    module.recompile()
    before = dump(module)
    with pytest.raises(RuntimeError, match="no code"):
        fused(module, [["sin"], ["cos"]])
    assert dump(module) == before
    assert same(module(X), chain()(X))


def test_the_lookup_table_names_the_nodes_or_is_refused() -> None:
    module = chain()
    nodes = named(module, ["sin", "cos"])
    with pytest.raises(AssertionError, match="differ in tan"):
        ours.fuse_as_graphmodule(module, nodes, "Body", dict.fromkeys([*nodes, *named(module, ["tan"])]))
    body, inputs, outputs = ours.fuse_as_graphmodule(module, nodes[::-1], "Body")
    assert ([*inputs], [*outputs]) == (named(module, ["x"]), named(module, ["cos"]))
    assert same(body(X), X.sin().cos())


def test_nodes_that_are_still_read_are_not_erased() -> None:
    module = chain()
    before = dump(module)
    for kind in (BrokenGraphError, RuntimeError):
        with pytest.raises(kind, match="Tried to erase Node cos but it still had 1 users in the graph: tan"):
            ours.erase_nodes(module, named(module, ["sin", "cos"]))
    assert dump(module) == before


# Inserting a call ------------------------------------------------------------------------------------------------


def test_who_reads_a_result_before_the_call_moves_behind_it() -> None:
    draft = Draft()
    x, y = draft.input("x"), draft.input("y")
    one = draft.call(torch.sin, x)
    early = draft.call(torch.cos, one)
    later = draft.call(torch.relu, early)
    apart = draft.call(torch.tan, y)
    module = draft.done((later, apart, draft.call(torch.neg, y)))
    expected = module(X, X)
    nodes = named(module, ["sin", "tan"])
    body, inputs, outputs = ours.fuse_as_graphmodule(module, nodes, "Body")
    ours.insert_subgm(module, body, inputs, outputs)
    module.graph.lint()
    ours.erase_nodes(module, nodes)
    module.recompile()
    assert [node.name for node in module.graph.nodes][2:5] == ["body", "getitem", "getitem_1"]
    assert same(module(X, X), expected)


def test_a_second_body_of_the_same_class_gets_its_own_name() -> None:
    module = chain()
    for names in (["sin"], ["cos"]):
        nodes = named(module, names)
        ours.insert_subgm(module, *ours.fuse_as_graphmodule(module, nodes, "fused_0"))
        ours.erase_nodes(module, nodes)
    module.recompile()
    assert list(fused_modules(module)) == ["fused_0", "fused_1"]
    assert same(module(X), chain()(X))


def test_a_call_that_does_not_fit_is_refused() -> None:
    module = chain()
    before = dump(module)
    body, inputs, outputs = ours.fuse_as_graphmodule(module, named(module, ["sin"]), "Body", always_return_tuple=True)
    for wrong, phrase in (
        (((), outputs), "takes 1 inputs, but orig_inputs are 0"),
        ((inputs, (*outputs, *outputs)), "returns 1 values"),
        ((inputs, ()), "Cannot determine insertion point"),
        ((tuple(named(chain(), ["x"])), outputs), "doesn't belong to passed in graph module"),
    ):
        with pytest.raises(AssertionError, match=phrase):
            ours.insert_subgm(module, body, *wrong)
    assert dump(module) == before


# What else holds on to a module --------------------------------------------------------------------------------------


def test_a_signature_that_watches_the_module_follows() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin().cos()

    exported = torch.export.export(Net(), (X,))
    module, signature = exported.graph_module, copy.deepcopy(exported.graph_signature)
    with module._set_replace_hook(signature.get_replace_hook()):
        ours.fuse_by_partitions(module, [[node for node in module.graph.nodes if node.op == "call_function"]])
    assert signature.user_outputs == ("fused_0",)


def test_whoever_watches_nodes_hears_of_all_of_them() -> None:
    module = chain()
    made: list[str] = []
    gone: list[str] = []
    module._register_create_node_hook(lambda node: made.append(node.name))
    module._register_erase_node_hook(lambda node: gone.append(node.name))
    fused(module, [["sin", "cos"]], always_return_tuple=True)
    assert made == ["fused_0", "getitem"]
    assert gone == ["cos", "sin"]


def test_a_calling_convention_survives() -> None:
    exported = torch.export.export(
        symbolic_trace(lambda pair: {"a": pair["x"].sin().cos() + pair["y"]}), ({"x": X, "y": X},)
    )
    module = exported.module()
    assert isinstance(module, GraphModule)
    expected = module({"x": X, "y": X})
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    ours.fuse_by_partitions(module, [nodes[:2]])
    assert same(module({"x": X, "y": X}), expected)


def test_the_result_is_copied_and_pickled(tmp_path: Any) -> None:
    module = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    expected = module(X)
    ours.fuse_by_partitions(module, [[node for node in module.graph.nodes if node.op == "call_module"][:2]])
    torch.save(module, tmp_path / "fused.pt")
    for each in (copy.deepcopy(module), torch.load(tmp_path / "fused.pt", weights_only=False)):
        assert same(each(X), expected)


def test_parameters_are_shared_with_the_body() -> None:
    module = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    ours.fuse_by_partitions(module, [[node for node in module.graph.nodes if node.op == "call_module"]])
    assert module.get_submodule("fused_0.0") is module.get_submodule("0")
    module(X).sum().backward()
    assert module.get_parameter("0.weight").grad is not None


def test_only_what_was_saved_is_saved_with_the_body() -> None:
    draft = Draft(kept=torch.ones(4), fleeting=torch.ones(4))
    draft.root.plain = torch.ones(4)  # type: ignore[assignment]
    value = draft.input("x")
    for name in ("kept", "fleeting", "plain"):
        value = draft.call(torch.add, value, draft.attr(name))
    module = draft.done(value)
    module.register_buffer("fleeting", module.fleeting, persistent=False)
    del module._buffers["plain"]
    module.__dict__["plain"] = torch.ones(4)
    ours.fuse_by_partitions(module, [[node for node in module.graph.nodes if node.op in ("get_attr", "call_function")]])
    assert sorted(module.state_dict()) == ["fused_0.kept", "kept"]
    assert same(module(X), X + 3)


# Placeholders ------------------------------------------------------------------------------------------------------


def with_constants() -> GraphModule:
    """The sum of `x` scaled by one constant and shifted by another, which is read twice."""
    draft = Draft()
    weight, x, bias = draft.input("p_weight"), draft.input("x"), draft.input("p_bias")
    scaled = draft.call(torch.mul, x, weight)
    return draft.done(draft.call(torch.add, draft.call(torch.add, scaled, bias), draft.call(torch.neg, bias)))


@pytest.mark.parametrize("names", [["p_weight", "mul"], ["p_bias", "neg"], ["p_weight", "p_bias", "mul", "neg", "add"]])
def test_a_module_owns_the_placeholders_that_are_fused_as_torchs_does(names: list[str]) -> None:
    found = []
    for module in (ours, theirs):
        gm = with_constants()
        body, inputs, outputs = module.fuse_as_graphmodule(gm, named(gm, names), "Body")
        taken = [node.name for node in body.graph.find_nodes(op="placeholder")]
        found.append((set(taken), [node.name for node in inputs], [node.name for node in outputs]))
        assert taken[: sum(name.startswith("p_") for name in names)] == [name for name in names if name[:2] == "p_"]
    assert found[0] == found[1]


def test_owned_placeholders_are_not_passed_and_can_be_erased() -> None:
    module = with_constants()
    nodes = named(module, ["p_weight", "mul"])
    body, inputs, outputs = ours.fuse_as_graphmodule(module, nodes, "Body")
    ours.insert_subgm(module, body, inputs, outputs)
    ours.erase_nodes(module, nodes)
    (call,) = module.graph.find_nodes(op="call_module")
    assert [node.name for node in call.args] == ["x"]  # type: ignore[union-attr]
    assert [node.name for node in module.graph.find_nodes(op="placeholder")] == ["x", "p_bias"]
    assert same(body(X, X + 1), X * (X + 1))


def test_what_a_module_does_not_own_must_be_passed() -> None:
    module = with_constants()
    body, _, outputs = ours.fuse_as_graphmodule(module, named(module, ["p_weight", "mul"]), "Body")
    with pytest.raises(AssertionError, match="takes 2 inputs, but orig_inputs are 0"):
        ours.insert_subgm(module, body, (), outputs)


def test_an_owned_placeholder_that_others_read_is_returned() -> None:
    module = with_constants()
    body, inputs, outputs = ours.fuse_as_graphmodule(module, named(module, ["p_bias", "neg"]), "Body")
    assert [node.name for node in outputs] == ["p_bias", "neg"]
    assert inputs == ()
    assert same(body(X), (X, -X))


def test_an_owned_placeholder_with_a_default_comes_last() -> None:
    draft = Draft()
    x, scale = draft.input("x"), draft.input("scale", 3)
    module = draft.done(draft.call(torch.mul, x, scale))
    body, *_ = ours.fuse_as_graphmodule(module, named(module, ["scale", "mul"]), "Body")
    assert same(body(X), X * 3)


def test_what_needs_an_owned_placeholder_from_outside_is_a_cycle() -> None:
    module = with_constants()
    with pytest.raises(AssertionError, match="Invalid partition, found dependency cycles"):
        ours.fuse_as_graphmodule(module, named(module, ["p_bias", "add_1"]), "Body")


@pytest.mark.parametrize("names", [["p_weight", "mul"], ["p_bias", "add", "add_1"], ["p_bias", "x"]])
def test_fused_partitions_take_their_placeholders_as_inputs(names: list[str]) -> None:
    module = with_constants()
    expected = module(X, X + 1, X + 2)
    ours.fuse_by_partitions(module, [named(module, names)])
    assert same(module(X, X + 1, X + 2), expected)
    assert len(fused_modules(module)) == (names != ["p_bias", "x"])


def test_placeholders_are_fused_in_any_mode() -> None:
    draft = Draft()
    weight, x = draft.input("p_weight"), draft.input("x")
    draft.grad(False)
    product = draft.call(torch.mul, x, weight)
    draft.grad(True)
    module = draft.done(product)
    body, *_ = ours.fuse_as_graphmodule(module, named(module, ["p_weight", "mul"]), "Body")
    assert [node.op for node in body.graph.nodes] == ["placeholder", "placeholder", "call_function", "output"]


# Graphs that are being edited --------------------------------------------------------------------------------------


def test_a_graph_without_an_output_returns_unused_values() -> None:
    graph = Graph()
    sine = graph.call_function(torch.sin, (graph.placeholder("x"),))
    cosine = graph.call_function(torch.cos, (sine,))
    module = GraphModule(nn.Module(), graph)
    body, *_ = ours.fuse_as_graphmodule(module, [sine, cosine], "Body")
    assert same(body(X), X.sin().cos())
    ours.fuse_by_partitions(module, [[sine, cosine]])
    (call,) = module.graph.find_nodes(op="call_module")
    module.graph.output(call)
    module.recompile()
    assert same(module(X), X.sin().cos())


def swapped() -> tuple[GraphModule, list[Node]]:
    """x -> sin -> cos -> tan -> relu, where a node behind the output has taken the place of the sine."""
    module = chain()
    sine, *others = named(module, ["sin", "cos", "tan", "relu"])
    new = module.graph.call_function(torch.exp, (sine.args[0],))
    sine.replace_all_uses_with(new)
    module.graph.erase_node(sine)
    return module, others


def test_nodes_behind_the_output_are_read_by_what_is_fused() -> None:
    module, (cosine, tangent, _) = swapped()
    body, inputs, outputs = ours.fuse_as_graphmodule(module, [cosine, tangent], "Body")
    assert same(body(X), X.cos().tan())
    assert ([node.name for node in inputs], outputs) == (["exp"], (tangent,))


def test_fusing_puts_a_graph_that_is_being_edited_in_order_as_torchs_does() -> None:
    for fuser in (ours, theirs):
        module, others = swapped()
        fuser.fuse_by_partitions(module, [dict.fromkeys(others[:2])])
        module.recompile()
        module.graph.lint()
        assert same(module(X), X.exp().cos().tan().relu())


def test_a_graph_that_was_edited_is_put_in_order_and_keeps_its_nodes() -> None:
    module, others = swapped()
    assert ours.legalize_graph(module) is module
    module.graph.lint()
    assert [node.name for node in module.graph.nodes] == ["x", "exp", "cos", "tan", "relu", "output"]
    assert named(module, ["cos", "tan", "relu"]) == others
    assert same(module(X), X.exp().cos().tan().relu())


def test_fusing_nothing_puts_a_graph_that_is_being_edited_in_order_too() -> None:
    module, _ = swapped()
    ours.fuse_by_partitions(module, [])
    module.graph.lint()
    assert same(module(X), X.exp().cos().tan().relu())


def test_putting_a_graph_in_order_keeps_writes_in_theirs() -> None:
    draft = Draft()
    x = draft.input("x")
    first = draft.call(torch.sin, draft.call(torch.neg, x))
    draft.method("add_", x, 1)
    module = draft.done((first, draft.call(torch.cos, x)))
    expected = [node.name for node in module.graph.nodes]
    assert [node.name for node in ours.legalize_graph(module).graph.nodes] == expected


def test_a_cycle_cannot_be_put_in_order() -> None:
    module = chain()
    sine, cosine = named(module, ["sin", "cos"])
    sine.args = (cosine,)
    with pytest.raises(RuntimeError, match=r"'sin' reads 'cos' before it is computed"):
        ours.legalize_graph(module)


def test_a_call_is_inserted_into_a_graph_that_is_being_edited() -> None:
    module, others = swapped()
    body, inputs, outputs = ours.fuse_as_graphmodule(module, others[:2], "Body")
    ours.insert_subgm(module, body, inputs, outputs)
    ours.erase_nodes(module, others[:2])
    module.graph.lint()
    module.recompile()
    assert same(module(X), X.exp().cos().tan().relu())


def test_nodes_are_erased_in_any_order_from_a_graph_that_is_being_edited() -> None:
    module = chain()
    relu = named(module, ["relu"])[0]
    (new,) = [module.graph.call_function(torch.exp, (relu,))]
    relu.args = (named(module, ["sin"])[0],)
    late = module.graph.call_function(torch.abs, (new,))
    new.prepend(late)
    ours.erase_nodes(module, [new, late])
    assert not module.graph.find_nodes(op="call_function", target=torch.exp)


def test_effects_count_in_a_graph_that_is_being_edited() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    read, write = graph.call_function(torch.sin, (x,)), graph.call_method("add_", (x, 1))
    after = graph.call_function(torch.cos, (x,))
    GraphModule(nn.Module(), graph)
    assert not ours.validate_partition([read, after])
    assert ours.validate_partition([read, write, after])
    assert ours.topo_sort([after, write, read]) == [read, write, after]


def test_a_graph_that_is_being_edited_keeps_its_modes() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    sine = graph.call_function(torch.sin, (x,))
    module = GraphModule(nn.Module(), graph)
    ours.fuse_by_partitions(module, [[sine]])
    with torch.enable_grad():
        module(X)
        assert not torch.is_grad_enabled()


def test_nodes_that_would_move_out_of_their_mode_are_refused() -> None:
    draft = Draft()
    x = draft.input("x")
    draft.grad(False)
    sine = draft.call(torch.sin, x)
    draft.grad(True)
    module = draft.done(sine)
    sine.args = (module.graph.call_function(torch.exp, (x,)),)
    with pytest.raises(BrokenGraphError):
        ours.fuse_as_graphmodule(module, [sine], "Body")


def test_dead_nodes_are_no_obstacle() -> None:
    module = chain()
    with module.graph.inserting_before(named(module, ["tan"])[0]):
        dead = module.graph.call_function(torch.exp, (named(module, ["sin"])[0],))
        body, _, outputs = ours.fuse_as_graphmodule(module, [*named(module, ["sin", "cos"]), dead], "Body")
    assert [node.name for node in outputs] == ["cos"]
    assert same(body(X), X.sin().cos())


def test_torchs_swapping_of_modules_works_with_our_fuser(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).relu()) + x

    net = Net()
    for name in ("fuse_as_graphmodule", "erase_nodes"):
        monkeypatch.setattr(_swap, name, getattr(ours, name))
    exported = torch.export.export(net, (X,), preserve_module_call_signature=("one", "two"))
    swapped_in = {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}
    for name, module in swapped_in.items():
        module.load_state_dict(net.get_submodule(name).state_dict())
    result = _swap._swap_modules(exported, dict(swapped_in))
    assert same(result(X), net(X))


class CallDelegate(HigherOrderOperator):
    """An operator like ExecuTorch's, which calls a module that is no graph."""

    def __init__(self) -> None:
        super().__init__("executorch_call_delegate")

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        return super().__call__(module, *args)


def test_what_stands_around_the_call_of_a_delegate_can_be_fused_as_in_torch() -> None:
    def make() -> GraphModule:
        draft = Draft(lowered=nn.Identity())
        x, y, lowered = draft.input("x"), draft.input("y"), draft.attr("lowered")
        first = draft.call(torch.ops.aten.add.Tensor, x, y)
        called = draft.call(delegate, lowered, x)
        return draft.done((draft.call(torch.ops.aten.mul.Tensor, first, x), called))

    delegate, found = CallDelegate(), []
    for fuser in (ours, theirs):
        module = make()
        nodes = [node for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        body, inputs, outputs = fuser.fuse_as_graphmodule(module, nodes, "Body")
        found.append((body.code, [node.name for node in inputs], [node.name for node in outputs]))
    assert found[0] == found[1]


# Effects, step by step -----------------------------------------------------------------------------------------------


def _two_random(x: Tensor) -> tuple[Tensor, ...]:
    first, second, other = torch.rand_like(x), torch.rand_like(x), x + 1
    return first, second, other


def _mutated_between(x: Tensor) -> tuple[Tensor, ...]:
    copied = x * 1
    mutated = copied.add_(1)
    return copied.sin(), x.cos(), mutated


@pytest.mark.parametrize(
    ("function", "names"), [(_two_random, ("rand_like", "add")), (_mutated_between, ("add_", "cos"))]
)
def test_a_call_inserted_by_hand_keeps_the_order_of_effects(function: Any, names: tuple[str, ...]) -> None:
    gm = symbolic_trace(function)
    nodes = ours.topo_sort([node for node in gm.graph.nodes if node.name in names])
    assert ours.validate_partition(nodes)
    body, inputs, outputs = ours.fuse_as_graphmodule(gm, nodes, "Fused")
    ours.insert_subgm(gm, body, inputs, outputs)
    ours.erase_nodes(gm, nodes)
    gm.recompile()
    results = []
    for one in (gm, function):
        torch.manual_seed(0)
        results.append(one(torch.zeros(2)))
    assert all(map(torch.equal, *results))


def test_a_call_without_a_place_between_effects_is_refused() -> None:
    """The call needs `late`, which comes after the draw that must come after the call."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        first = torch.rand_like(x)
        second = torch.rand_like(x)
        late = x.cos()
        return first, second, late * 2

    gm = symbolic_trace(function)
    nodes = [node for node in gm.graph.nodes if node.name in ("rand_like", "mul")]
    before = str(gm.graph)
    body, inputs, outputs = ours.fuse_as_graphmodule(gm, nodes, "Fused")
    with pytest.raises(AssertionError, match="'rand_like_1' must run after it"):
        ours.insert_subgm(gm, body, inputs, outputs)
    assert str(gm.graph) == before
    fused = ours.fuse_by_partitions(gm, [nodes])
    torch.manual_seed(0)
    found = fused(torch.ones(2))
    torch.manual_seed(0)
    assert all(map(torch.equal, found, function(torch.ones(2))))
