"""`compat.partitioner` against torch's own: the same partitions wherever torch's are right, and right where not.

Where ours differs on purpose:

| difference | why |
|---|---|
| effects and modes count as dependencies | torch moves reads past writes and draws past draws, and mixes modes |
| getitem follows only what makes a container, by a constant | torch forces slices in, or never ends |
| outputs are never in a partition | torch fails later |
| inputs and attributes go to the one partition that reads them, or stay outside | torch puts them anywhere |
| modules and methods count as compute | torch leaves graphs of modules out |
| the name of an operator stands for its overloads | the default list of torch names `aten.view`, which no node calls |
| without horizontal fusion, partitions are legal together | torch's are not always |
"""

from __future__ import annotations

import inspect
import operator
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.compat.fuser_helpers import Supported, calls_but, described, fused_modules, named, some_names
from tests.compat.split_helpers import Draft, dump, same
from tests.compat.test_split_module_parity import random_graph
from tests.helpers.work import calls_during
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra import partitioner as theirs
from torch.fx.passes.operator_support import OperatorSupport, create_op_support
from torch.fx.passes.tools_common import legalize_graph
from torch.fx.passes.utils import fuser_utils as their_fuser

from partita import Program, compare
from partita.compat import fuser_utils as our_fuser
from partita.compat import partitioner as ours
from partita.errors import CallbackError, OptionError
from partita.program.program import summation_tolerance
from partita.testing import Case, captured_case, programs

X = torch.linspace(-2, 2, 4)
AS_IN_TORCH_2_13 = pytest.mark.skipif(
    "skip_horizontal_fusion" not in inspect.signature(theirs.CapabilityBasedPartitioner).parameters,
    reason="the proposals are those of torch 2.13",
)
Partitions = list[tuple[int | None, list[tuple[str, int | None]]]]


def proposed(partitions: Iterable[Any]) -> Partitions:
    return [(each.id, [(node.name, order) for node, order in each.nodes.items()]) for each in partitions]


def sets(partitions: Iterable[Any]) -> list[set[str]]:
    return [{node.name for node in each.nodes} for each in partitions]


def propose(module: GraphModule, support: Any, **options: Any) -> list[ours.Partition]:
    options = {"allows_single_node_partition": True, **options}
    return ours.CapabilityBasedPartitioner(module, support, **options).propose_partitions()


def both(make: Callable[[], GraphModule], support: Any, **options: Any) -> list[tuple[Any, list[Any]]]:
    """Our partitioner and torch's, each with its proposal for a graph of its own."""
    made = [module.CapabilityBasedPartitioner(make(), support, **options) for module in (ours, theirs)]
    return [(each, each.propose_partitions()) for each in made]


def pure_graph(seed: int, size: int) -> GraphModule:
    """Functions of two inputs; from one to twenty values are in reach of the next."""
    dice, graph = random.Random(seed), Graph()
    made = [graph.placeholder("x"), graph.placeholder("y")]
    near = dice.choice([1, 2, 3, 6, 20])
    for _ in range(size):
        function = dice.choice([torch.sin, torch.neg, torch.sub, torch.maximum])
        count = 2 if function in (torch.sub, torch.maximum) else 1
        made.append(graph.call_function(function, tuple(dice.choice(made[-near:]) for _ in range(count))))
    graph.output(tuple(node for node in made if not node.users))
    return GraphModule(nn.Module(), graph)


# As torch does it --------------------------------------------------------------------------------------------------


@AS_IN_TORCH_2_13
def test_the_names_and_signatures_are_torchs() -> None:
    for name in ours.__all__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(other).parameters)
        for method, function in inspect.getmembers(other, inspect.isfunction):
            if not method.startswith("__"):
                assert list(inspect.signature(getattr(mine, method)).parameters) == list(
                    inspect.signature(function).parameters
                )


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_a_proposal_and_its_fusion_are_torchs(seed: int, alone: bool) -> None:
    refused = some_names(pure_graph(seed, 24), seed, 0.25)
    support = Supported(lambda node: node.op == "call_function" and node.name not in refused)
    options = {"allows_single_node_partition": alone}
    (mine, partitions), (other, expected) = both(lambda: pure_graph(seed, 24), support, **options)
    assert proposed(partitions) == proposed(expected)
    fused, wanted = mine.fuse_partitions(partitions), other.fuse_partitions(expected)
    assert fused is mine.graph_module
    assert described(fused) == described(wanted)
    assert same(fused(X, X + 1), wanted(X, X + 1))


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("seed", range(25))
def test_a_graph_that_calls_modules_and_methods_is_fused_as_torch_does(seed: int) -> None:
    refused = some_names(random_graph(seed, size=20), seed, 0.2)
    support = calls_but(*refused)
    (mine, partitions), (other, expected) = both(
        lambda: random_graph(seed, size=20), support, allows_single_node_partition=True
    )
    assert proposed(partitions) == proposed(expected)
    assert described(mine.fuse_partitions(partitions)) == described(other.fuse_partitions(expected))


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("seed", range(30))
def test_connected_partitions_are_torchs(seed: int) -> None:
    size = 24 if seed % 2 else 60
    refused = some_names(pure_graph(seed, size), seed, 0.25)
    support = Supported(lambda node: node.op == "call_function" and node.name not in refused)
    options = {"allows_single_node_partition": True, "skip_horizontal_fusion": True}
    (mine, partitions), (other, expected) = both(lambda: pure_graph(seed, size), support, **options)
    wanted = proposed(expected)
    assert all(is_connected(list(partition.nodes)) for partition in partitions)
    try:
        other.fuse_partitions(expected)
    except AssertionError:
        return  # Some of torch's partitions need each other.
    assert proposed(partitions) == wanted
    assert described(mine.fuse_partitions(partitions)) == described(other.graph_module)


def is_connected(nodes: list[Node]) -> bool:
    inside, found = set(nodes), {nodes[0]}
    waiting = [nodes[0]]
    while waiting:
        node = waiting.pop()
        for near in (*node.users, *node.all_input_nodes):
            if near in inside and near not in found:
                found.add(near)
                waiting.append(near)
    return found == inside


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("seed", range(12))
def test_options_about_single_nodes_are_torchs(seed: int) -> None:
    refused = some_names(pure_graph(seed, 24), seed, 0.35)
    support = Supported(lambda node: node.op == "call_function" and node.name not in refused)
    for options in (
        {"non_compute_ops": ["torch.sin", "torch.neg"]},
        {"allowed_single_node_partition_ops": ["torch.sub"]},
        {"non_compute_ops": ["torch.maximum"], "allowed_single_node_partition_ops": ["torch.maximum", "torch.sin"]},
    ):
        (_, partitions), (_, expected) = both(lambda: pure_graph(seed, 24), support, **options)
        assert proposed(partitions) == proposed(expected)


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("seed", range(25))
def test_bookends_are_taken_out_as_torch_does(seed: int) -> None:
    refused = some_names(pure_graph(seed, 24), seed, 0.2)
    support = Supported(lambda node: node.op == "call_function" and node.name not in refused)
    names = random.Random(seed).choice([["torch.sin", "torch.neg"], ["torch.sub"], ["torch.sin", "torch.sub"], []])
    found = both(lambda: pure_graph(seed, 24), support, non_compute_ops=names, allows_single_node_partition=True)
    for each, partitions in found:
        each.remove_bookend_non_compute_ops(partitions)
    assert sets(found[0][1]) == sets(found[1][1])
    expected = pure_graph(seed, 24)(X, X + 1)
    assert same(found[0][0].fuse_partitions(found[0][1])(X, X + 1), expected)


def test_a_bookend_that_a_mutation_keeps_in_the_middle_stays() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_method("add_", (x, 2))
    halves = graph.call_function(torch.chunk, (x, 2), name="halves")
    items = [graph.call_function(operator.getitem, (halves, number)) for number in (1, 0)]
    joined = graph.call_function(torch.cat, (items,), name="joined")
    graph.output(joined)
    module = GraphModule({}, graph)
    expected = module(X.clone())
    names = ["torch.chunk", "_operator.getitem"]
    partitioner = ours.CapabilityBasedPartitioner(
        module,
        Supported(lambda node: node.op != "placeholder"),
        allows_single_node_partition=True,
        non_compute_ops=names,
    )
    partitions = partitioner.propose_partitions()
    partitioner.remove_bookend_non_compute_ops(partitions)
    assert [len(partition.nodes) for partition in partitions] == [5]
    assert same(partitioner.fuse_partitions(partitions)(X.clone()), expected)


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("model", ["Mixer", "Attention"])
def test_an_exported_model_is_fused_as_torch_does(model: str) -> None:
    case = captured_case(model, "export")
    calls = [node.name for node in case.graph_module.graph.nodes if node.op == "call_function"]
    refused = set(random.Random(0).sample(calls, len(calls) // 5))
    support = Supported(lambda node: node.op == "call_function" and node.name not in refused)
    (mine, partitions), (other, expected) = both(lambda: case.copy().graph_module, support)
    assert sets(partitions) == sets(expected)
    fused, wanted = mine.fuse_partitions(partitions), other.fuse_partitions(expected)
    assert described(fused)["code"] == described(wanted)["code"]
    torch.manual_seed(0)
    expected_values = case.copy().run()
    torch.manual_seed(0)
    assert same(fused(*case.args), expected_values)


@AS_IN_TORCH_2_13
def test_items_of_containers_go_to_the_partition_of_their_producer_as_in_torch() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = torch.topk(x.sin(), 2)
        return values.cos() * 2, places + 1

    support = Supported(
        lambda node: node.op == "call_function" and "cos" not in node.name and "getitem" not in node.name
    )
    (_, partitions), (_, expected) = both(lambda: make_fx(function)(X), support, allows_single_node_partition=True)
    assert sets(partitions) == sets(expected)
    assert {"topk", "getitem", "getitem_1"} <= sets(partitions)[1]


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    "pair",
    [
        lambda x: torch.sort(x),
        lambda x: x.sort(),
        lambda x: torch.max(x, 0),
        lambda x: x.min(0),
        lambda x: torch.median(x, 0),
        lambda x: torch.meshgrid(x[0], x[1]),
    ],
)
def test_what_may_be_a_container_does_not_cross_a_border_as_in_torch(
    pair: Callable[[Tensor], Any], alone: bool
) -> None:
    """Without traced values it is unknown whether `torch.max(x, 0)` returns a tensor or a tuple."""

    def function(x: Tensor) -> Tensor:
        return pair(x)[0].cos() + 1

    (cosine,) = symbolic_trace(function).graph.find_nodes(op="call_method", target="cos")
    source = cosine.args[0].args[0].name
    for unsupported in ((source,), ("cos",)):
        support = Supported(lambda node, names=unsupported: node.op.startswith("call_") and node.name not in names)
        options = {"allows_single_node_partition": True, "skip_horizontal_fusion": alone}
        (_, partitions), (_, expected) = both(lambda: symbolic_trace(function), support, **options)
        assert proposed(partitions) == proposed(expected)


@AS_IN_TORCH_2_13
def test_no_partition_holds_nothing_but_an_item() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.special.erfcx(torch.max(x, 0)[0])

    support = calls_but("max_1", "special_erfcx")
    (_, partitions), (_, expected) = both(
        lambda: symbolic_trace(function), support, allows_single_node_partition=True, skip_horizontal_fusion=True
    )
    assert sets(partitions) == sets(expected) == []


def test_partitions_hold_nodes_as_torchs_do() -> None:
    nodes = list(pure_graph(0, 3).graph.nodes)
    for module in (ours, theirs):
        partition = module.Partition(7, nodes[:2], [5, 6])
        partition.add_node(nodes[2], 4)
        partition.add_node(nodes[3])
        partition.remove_node(nodes[0])
        assert (partition.id, partition.size()) == (7, 3)
        assert partition.nodes == {nodes[1]: 6, nodes[2]: 4, nodes[3]: None}
        assert repr(partition) == str(partition.nodes)
        assert module.Partition().nodes == {}
        assert module.Partition(nodes=nodes[:1]).nodes == {nodes[0]: None}
        with pytest.raises(AssertionError, match="nodes and node_orders must have the same length"):
            module.Partition(nodes=nodes, node_orders=[1])


def test_torchs_supports_and_partitions_are_taken() -> None:
    module = pure_graph(3, 12)
    support = create_op_support(lambda submodules, node: node.op == "call_function")
    expected = module(X, X)
    partitions = theirs.CapabilityBasedPartitioner(module, support).propose_partitions()
    fused = ours.CapabilityBasedPartitioner(module, support).fuse_partitions(partitions, prefix="part_")  # type: ignore[arg-type]
    assert list(fused_modules(fused, "part_")) == ["part_0"]
    assert same(fused(X, X), expected)


def test_a_subclass_may_say_what_is_supported() -> None:
    class Own(ours.CapabilityBasedPartitioner):
        def _is_node_supported(self, node: Node) -> bool:
            return super()._is_node_supported(node) and node.name != "sin"

    (mine,) = sets(Own(chain(), calls_but()).propose_partitions())
    assert mine == {"cos", "tan", "relu"}


def test_every_node_is_queried_once_with_all_modules() -> None:
    module = random_graph(1, size=10)
    asked: list[str] = []

    class Counting(OperatorSupport):
        def is_node_supported(self, submodules: Any, node: Node) -> bool:
            asked.append(node.name)
            assert set(submodules) == {name for name, _ in module.named_modules()}
            return False

    assert propose(module, Counting()) == []
    assert asked == [node.name for node in reversed(module.graph.nodes)]


def test_dependencies_between_nodes_can_be_queried() -> None:
    module = pure_graph(5, 10)
    for node in module.graph.nodes:
        expected = theirs._DependencyViewer(module).downstreams_of(node)
        assert ours.CapabilityBasedPartitioner(module, calls_but()).dependency_viewer.downstreams_of(node) == expected


# Where torch is wrong ----------------------------------------------------------------------------------------------


def chain() -> GraphModule:
    draft = Draft()
    value = draft.input("x")
    for function in (torch.sin, torch.cos, torch.tan, torch.relu):
        value = draft.call(function, value)
    return draft.done(value)


def test_horizontal_fusion_does_not_move_a_read_past_an_unsupported_write() -> None:
    draft = Draft()
    x = draft.input("x")
    before = draft.call(torch.cos, draft.call(torch.sin, x))
    draft.method("add_", x, 1.0)
    after = draft.call(torch.tan, draft.call(torch.neg, x))
    module = draft.done((before, after))
    expected = module(X.clone())
    partitioner = ours.CapabilityBasedPartitioner(module, calls_but("add_"))
    assert sets(partitioner.propose_partitions()) == [{"neg", "tan"}, {"sin", "cos"}]
    assert same(partitioner.partition_and_fuse()(X.clone()), expected)


def test_random_operators_keep_their_order() -> None:
    draft = Draft()
    x = draft.input("x")
    made = [draft.call(torch.rand_like, x), draft.call(torch.bernoulli, x), draft.call(torch.rand_like, x)]
    module = draft.done(tuple(draft.call(torch.neg, draft.call(torch.sin, each)) for each in made))
    x = torch.full((4,), 0.5)
    torch.manual_seed(1)
    expected = module(x)
    fused = ours.CapabilityBasedPartitioner(module, calls_but("bernoulli")).partition_and_fuse()
    torch.manual_seed(1)
    assert same(fused(x), expected)


def test_nodes_on_the_two_sides_of_set_grad_enabled_are_not_fused() -> None:
    draft = Draft()
    x = draft.input("x")
    one = draft.call(torch.cos, draft.call(torch.sin, x))
    draft.grad(False)
    two = draft.call(torch.tan, draft.call(torch.neg, x))
    draft.grad(True)
    module = draft.done((one, two))
    for support in (calls_but("_set_grad_enabled", "_set_grad_enabled_1"), calls_but()):
        assert sorted(map(sorted, sets(propose(module, support)))) == [["cos", "sin"], ["neg", "tan"]]
    x = X.clone().requires_grad_()
    expected = module(x)
    fused = ours.CapabilityBasedPartitioner(module, calls_but()).partition_and_fuse()
    assert same(fused(x), expected)
    assert [value.requires_grad for value in fused(x)] == [True, False]


def test_a_second_run_does_not_overwrite_the_modules_of_the_first() -> None:
    draft = Draft()
    x = draft.input("x")
    one = draft.call(torch.cos, draft.call(torch.sin, x))
    two = draft.call(torch.tan, draft.call(torch.neg, draft.call(torch.relu, one)))
    module = draft.done(two)
    expected = module(X)
    for kept in (("sin", "cos"), ("neg", "tan")):
        support = Supported(lambda node, kept=kept: node.name in kept)  # type: ignore[misc]
        ours.CapabilityBasedPartitioner(module, support).partition_and_fuse()
    assert list(fused_modules(module)) == ["fused_0", "fused_1"]
    assert same(module(X), expected)


def test_a_getitem_with_a_computed_index_stays_out_of_what_it_depends_on() -> None:
    draft = Draft()
    x, index = draft.input("x"), draft.input("index")
    rows = draft.call(torch.sin, x)
    place = draft.call(torch.abs, index)
    item = draft.call(operator.getitem, rows, place)
    module = draft.done(draft.call(torch.neg, item))
    args = (torch.arange(12.0).view(4, 3), torch.tensor([-1, 2]))
    expected = module(*args)
    fused = ours.CapabilityBasedPartitioner(module, calls_but("abs"), True).partition_and_fuse()
    assert same(fused(*args), expected)


def test_an_unsupported_slice_of_a_tensor_stays_outside() -> None:
    draft = Draft()
    x = draft.input("x")
    value = draft.call(torch.cos, draft.call(torch.sin, x))
    module = draft.done(draft.call(operator.getitem, value, slice(0, 2)))
    assert sets(propose(module, calls_but("getitem"))) == [{"sin", "cos"}]


@pytest.mark.parametrize("support", [Supported(lambda node: True), OperatorSupport({"_operator.add": None})])
def test_a_support_that_takes_inputs_and_outputs_is_handled(support: OperatorSupport) -> None:
    module = symbolic_trace(lambda x, y: (x + y) + y)
    partitioner = ours.CapabilityBasedPartitioner(module, support)
    assert sets(partitioner.propose_partitions()) == [{"x", "y", "add", "add_1"}]
    assert same(partitioner.partition_and_fuse()(X, X), X + X + X)


def test_every_overload_of_view_counts_as_no_compute() -> None:
    module = make_fx(lambda x: (x.view(2, 2).sin(), x.view(4, 1).view(4)))(X)
    refused = {node.name for node in module.graph.nodes if node.target is torch.ops.aten.sin.default}
    assert propose(module, calls_but(*refused), allows_single_node_partition=False) == []
    partitioner = ours.CapabilityBasedPartitioner(module, calls_but(), non_compute_ops=["torch.ops.aten.sin"])
    assert partitioner.propose_partitions() == []


@AS_IN_TORCH_2_13
@pytest.mark.parametrize(("seed", "size"), [(253, 24), (120, 30)])
def test_connected_partitions_are_legal_where_torchs_are_not(seed: int, size: int) -> None:
    refused = some_names(pure_graph(seed, size), seed, 0.25)
    support = Supported(lambda node: node.op == "call_function" and node.name not in refused)
    options = {"allows_single_node_partition": True, "skip_horizontal_fusion": True}
    (mine, partitions), (other, illegal) = both(lambda: pure_graph(seed, size), support, **options)
    with pytest.raises(AssertionError, match="Invalid partition, found dependency cycles"):
        other.fuse_partitions(illegal)
    assert same(mine.fuse_partitions(partitions)(X, X + 1), pure_graph(seed, size)(X, X + 1))


def test_an_attribute_goes_to_the_one_partition_that_reads_it() -> None:
    draft = Draft(one=torch.ones(4), two=torch.full((4,), 2.0), body=symbolic_trace(lambda x: (x.sin(),)))
    x, one, two, body = draft.input("x"), draft.attr("one"), draft.attr("two"), draft.attr("body")
    first = draft.call(torch.mul, draft.call(torch.add, x, one), two)
    run = draft.call(operator.getitem, draft.call(torch.ops.higher_order.cond, True, body, body, [first]), 0)
    refused = draft.call(torch.neg, run)
    module = draft.done(draft.call(torch.sin, draft.call(torch.add, refused, two)))
    support = Supported(lambda node: node.name != "neg")
    expected = module(X)
    partitioner = ours.CapabilityBasedPartitioner(module, support)
    assert sets(partitioner.propose_partitions()) == [
        {"add_1", "sin"},
        {"x", "one", "body", "add", "mul", "cond", "getitem"},
    ]
    fused = partitioner.partition_and_fuse()
    assert [node.name for node in fused.graph.find_nodes(op="get_attr")] == ["two"]
    assert fused.fused_1.body is fused.body
    assert same(fused(X), expected)


@given(programs(max_nodes=25), st.integers(0, 1000), st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_fused_program_means_the_same(case: Case, seed: int, connected: bool) -> None:
    module = case.copy().graph_module
    refused = some_names(module, seed, random.Random(seed).choice([0.0, 0.1, 0.3]))
    partitioner = ours.CapabilityBasedPartitioner(
        module, calls_but(*refused), bool(seed % 2), skip_horizontal_fusion=connected
    )
    fused = partitioner.partition_and_fuse()
    fused.graph.lint()
    program = Program.of(case.graph_module)
    comparison = compare(program, fused, case.args, case.kwargs, tolerance=summation_tolerance(program))
    assert comparison.equal, str(comparison)


def test_proposing_is_linear_work() -> None:
    def work(size: int) -> int:
        module = pure_graph(2, size)
        support = calls_but(*some_names(module, 0, 0.1))
        assert len(propose(module, support)) > size // 100
        return calls_during(propose, module, support)

    assert work(8000) < 12 * work(1000)


# Errors ----------------------------------------------------------------------------------------------------------


def test_a_support_that_raises_is_named_with_its_node_and_nothing_is_changed() -> None:
    module = chain()
    before = dump(module)

    def failing(node: Node) -> bool:
        return node.op == "placeholder" or 1 / (node.name != "tan") > 0

    with pytest.raises(CallbackError, match="operator support raised ZeroDivisionError for node 'tan'"):
        ours.CapabilityBasedPartitioner(module, Supported(failing)).partition_and_fuse()
    assert dump(module) == before


def test_what_cannot_be_queried_is_refused() -> None:
    for kind in (OptionError, AttributeError):
        with pytest.raises(kind, match="is_node_supported"):
            ours.CapabilityBasedPartitioner(chain(), lambda node: True)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"torch\.fx\.GraphModule, not Linear"):
        ours.CapabilityBasedPartitioner(nn.Linear(2, 2), calls_but())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="non_compute_ops is a list of names"):
        ours.CapabilityBasedPartitioner(chain(), calls_but(), non_compute_ops="aten.view").propose_partitions()


def test_proposals_that_were_edited_into_a_cycle_are_refused_whole() -> None:
    module = chain()
    before = dump(module)
    partitioner = ours.CapabilityBasedPartitioner(module, calls_but("cos"), True)
    partitions = partitioner.propose_partitions()
    partitions[0].add_node(named(module, ["sin"])[0])
    partitions[1].remove_node(named(module, ["sin"])[0])
    with pytest.raises(AssertionError, match="Invalid partition, found dependency cycles"):
        partitioner.fuse_partitions(partitions)
    assert dump(module) == before


def test_a_subclass_may_put_a_viewer_of_its_own_in_place() -> None:
    class Grouped(ours.CapabilityBasedPartitioner):
        def __init__(self, graph_module: GraphModule) -> None:
            super().__init__(graph_module, calls_but(), allows_single_node_partition=True)
            self.dependency_viewer = "mine"

    grouped = Grouped(chain())
    assert grouped.dependency_viewer == "mine"
    assert len(grouped.propose_partitions()) == 1


class Dialect:
    """A target of another dialect, as ExecuTorch has them: it calls an operator of torch and carries its schema."""

    def __init__(self, operator: Any) -> None:
        self._op, self._schema, self.__name__ = operator, operator._schema, operator.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._op(*args, **kwargs)


@pytest.mark.parametrize(("between", "together"), [("sin.default", True), ("sin_.default", False)])
def test_a_target_of_another_dialect_is_as_pure_as_its_schema_says(between: str, together: bool) -> None:
    packet, _, overload = between.partition(".")
    add = Dialect(torch.ops.aten.add.Tensor)
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.create_node("call_function", add, (x, y), name="add_0")
    other = graph.create_node(
        "call_function", Dialect(getattr(getattr(torch.ops.aten, packet), overload)), (x,), name="other"
    )
    second = graph.create_node("call_function", add, (first, x), name="add_1")
    graph.output((second, other))
    found = propose(GraphModule(nn.Module(), graph), calls_but("other"))
    assert len(found) == (1 if together else 2)


# Placeholders, subclasses, and graphs that are being edited -----------------------------------------------------------


def with_constants(seed: int) -> GraphModule:
    """A graph in which every other value is scaled by a constant of its own."""
    dice, graph = random.Random(seed), Graph()
    constants = [graph.placeholder(f"p_{at}") for at in range(6)]
    made = [graph.placeholder("x")]
    for constant in constants:
        made.append(graph.call_function(torch.mul, (dice.choice(made[-3:]), constant)))
        made.append(graph.call_function(dice.choice([torch.sin, torch.neg]), (dice.choice(made[-3:]),)))
    graph.output(tuple(node for node in made if not node.users))
    return GraphModule(nn.Module(), graph)


@AS_IN_TORCH_2_13
@pytest.mark.parametrize("seed", range(20))
def test_supported_placeholders_of_one_partition_are_proposed_as_torch_does(seed: int) -> None:
    refused = {name for name in some_names(with_constants(seed), seed, 0.3) if name.startswith(("sin", "neg"))}
    support = Supported(
        lambda node: node.name.startswith("p_") or (node.op == "call_function" and node.name not in refused)
    )
    (mine, partitions), (_, expected) = both(lambda: with_constants(seed), support, allows_single_node_partition=True)
    assert proposed(partitions) == proposed(expected)
    inputs = [X + at for at in range(7)]
    assert same(mine.fuse_partitions(partitions)(*inputs), with_constants(seed)(*inputs))


def test_a_placeholder_that_two_partitions_read_stays_outside() -> None:
    draft = Draft()
    weight, x = draft.input("p_weight"), draft.input("x")
    refused = draft.call(torch.neg, draft.call(torch.mul, x, weight))
    module = draft.done(draft.call(torch.add, refused, weight))
    support = Supported(lambda node: node.name == "p_weight" or (node.op == "call_function" and node.name != "neg"))
    assert sets(propose(module, support)) == [{"add"}, {"mul"}]


def test_a_subclass_may_set_all_that_torchs_partitioner_sets_and_leave_its_init_out() -> None:
    class Own(ours.CapabilityBasedPartitioner):
        def __init__(self, graph_module: GraphModule) -> None:
            self.graph_module, self.operator_support = graph_module, calls_but("tan")
            self.allows_single_node_partition = False
            self.non_compute_ops = self.allowed_single_node_partition_ops = []
            self.skip_horizontal_fusion = False

    own = Own(chain())
    assert sets(own.propose_partitions()) == [{"sin", "cos"}]
    own.allowed_single_node_partition_ops = ["torch.relu"]
    assert sets(own.propose_partitions()) == [{"relu"}, {"sin", "cos"}]
    own.operator_support, own.graph_module = calls_but(), chain()
    assert len(own.partition_and_fuse().graph.find_nodes(op="call_module")) == 1


def test_every_attribute_of_torchs_partitioner_can_be_set() -> None:
    mine, other = (
        ours.CapabilityBasedPartitioner(chain(), calls_but()),
        theirs.CapabilityBasedPartitioner(chain(), calls_but()),
    )
    for name in vars(other):
        setattr(mine, name, mark := object())
        assert getattr(mine, name) is mark


def test_modules_and_methods_count_as_compute() -> None:
    draft = Draft(one=nn.ReLU(), two=nn.Tanh())
    x = draft.input("x")
    modules = draft.module("two", draft.module("one", x))
    methods = draft.method("cos", draft.method("sin", draft.call(torch.neg, modules)))
    single = draft.module("one", draft.call(torch.neg, methods))
    viewed = draft.method("view", draft.method("exp", draft.call(torch.neg, single)), 4)
    module = draft.done(viewed)
    refused = [node.name for node in module.graph.nodes if node.target is torch.neg]
    found = sets(propose(module, calls_but(*refused), allows_single_node_partition=False))
    assert found == [{"sin", "cos"}, {"one", "two"}]


def test_a_graph_without_an_output_is_proposed_as_torch_does() -> None:
    def open_chain() -> GraphModule:
        module = chain()
        module.graph.erase_node(module.graph.output_node())
        return module

    (_, partitions), (_, expected) = both(open_chain, calls_but("tan"), allows_single_node_partition=True)
    assert proposed(partitions) == proposed(expected)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.erfinv(self.one(x).tanh())) + x


def delegated(partitioning: Any, fusing: Any) -> list[tuple[Any, ...]]:
    """An exported program whose partitions own their parameters, cut out one by one as ExecuTorch does."""
    gm = torch.export.export(TwoLayers(), (X,)).graph_module
    support = Supported(
        lambda node: node.name.startswith("p_") or (node.op == "call_function" and node.name != "erfinv")
    )
    partitioner = partitioning.CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True)
    found: list[tuple[Any, ...]] = []
    groups = [[node.name for node in partition.nodes] for partition in partitioner.propose_partitions()]
    for number, names in enumerate(groups):
        nodes = fusing.topo_sort(named(gm, names))
        body, inputs, outputs = fusing.fuse_as_graphmodule(gm, nodes, f"Delegate{number}")
        fusing.insert_subgm(gm, body, inputs, outputs)
        fusing.erase_nodes(gm, nodes)
        legalize_graph(gm)
        called = [node.name for node in gm.graph.nodes if node.op == "call_module"]
        taken = sorted(node.name for node in body.graph.find_nodes(op="placeholder"))
        calls = [node.name for node in body.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)]
        found.append((taken, calls, list(map(str, inputs)), list(map(str, outputs)), called, str(gm.graph)))
    return found


@AS_IN_TORCH_2_13
def test_partitions_of_an_exported_program_take_their_parameters_along_as_in_torch() -> None:
    found = delegated(ours, our_fuser)
    assert found == delegated(theirs, their_fuser)
    assert [taken for taken, *_ in found] == [
        ["erfinv", "p_two_bias", "p_two_weight", "x"],
        ["p_one_bias", "p_one_weight", "x"],
    ]


def edited(seed: int) -> GraphModule:
    """A graph of functions in which nodes behind the output have taken the place of others."""
    module, dice = pure_graph(seed, 12), random.Random(seed)
    for _ in range(2):
        old = dice.choice([node for node in module.graph.nodes if node.op == "call_function"])
        old.replace_all_uses_with(module.graph.call_function(torch.exp, (old.args[0],)))
        module.graph.erase_node(old)
    return module


@pytest.mark.parametrize("seed", range(30))
def test_graphs_that_are_being_edited_are_partitioned_and_fused(seed: int) -> None:
    refused = some_names(edited(seed), seed, 0.3)
    support = Supported(lambda node: node.op != "output" and node.name not in refused)
    options = {"allows_single_node_partition": True, "skip_horizontal_fusion": seed % 3 == 0}
    partitioner = ours.CapabilityBasedPartitioner(edited(seed), support, **options)
    fused = partitioner.partition_and_fuse()
    fused.graph.lint()
    assert same(fused(X, X + 1), legalize_graph(edited(seed))(X, X + 1))
