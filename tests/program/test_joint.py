"""Joint graphs as programs: which half a node is in, what is saved between the halves, regions of the forward."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.program.joint_helpers import Block, Stack
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import partita
from partita import Partition, Program, Region
from partita.errors import CycleError, OptionError, SignatureError
from partita.policies import ByCapability, ByLabel, ByModule, BySize, InForward
from partita.program.joint import Joint
from partita.regions.joint_forward import forward_alone, forward_part
from partita.treatments import Call, Mark

ATEN = torch.ops.aten
X = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(3))


def _joint(program: Program) -> Joint:
    assert program.joint is not None
    return program.joint


def _names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


def _by_hand(function: Callable[..., Tensor], *inputs: Tensor, tracing_mode: str = "fake") -> GraphModule:
    """The joint graph of a function of one result, as make_fx traces it: the result, then all gradients."""

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        primals = [primal.detach().requires_grad_() for primal in primals]
        result = function(*primals)
        return [result.detach(), *torch.autograd.grad(result, primals, tangents)]

    tangent = torch.ones_like(function(*inputs))
    return make_fx(joint, tracing_mode=tracing_mode)(list(inputs), [tangent])


def test_halves_inputs_and_outputs_of_a_graph_that_was_made_by_hand() -> None:
    graph = Graph()
    first, second, tangent = (graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1"))
    product = graph.call_function(ATEN.mul.Tensor, (first, second))
    sine = graph.call_function(ATEN.sin.default, (product,))
    slope = graph.call_function(ATEN.cos.default, (product,))
    back = graph.call_function(ATEN.mul.Tensor, (tangent, slope))
    gradient = graph.call_function(ATEN.mul.Tensor, (back, second))
    graph.output(([sine], [gradient, None]))
    joint = _joint(Program.of(GraphModule({}, graph), forward_outputs=1))
    assert joint.inputs == (first, second)
    assert joint.tangents == (tangent,)
    assert joint.forward_outputs == (sine,)
    assert joint.gradients == (gradient, None)
    assert joint.forward == (product, sine, slope)
    assert joint.backward == (back, gradient)
    assert [(entry.node, entry.is_input, entry.bytes) for entry in joint.saved] == [
        (second, True, None),
        (slope, False, None),
    ]
    assert joint.saved_bytes is None
    assert joint.state == joint.mutated == ()


def test_a_node_that_its_tracer_calls_backward_is_backward() -> None:
    graph = Graph()
    first, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    sine = graph.call_function(ATEN.sin.default, (first,))
    slope = graph.call_function(ATEN.cos.default, (first,))
    twice = graph.call_function(ATEN.mul.Tensor, (slope, 2))
    needed = graph.call_function(ATEN.neg.default, (sine,))
    back = graph.call_function(ATEN.mul.Tensor, (tangent, twice))
    graph.output([sine, needed, back])
    slope.meta["partitioner_tag"] = needed.meta["partitioner_tag"] = "is_backward"
    joint = _joint(Program.of(GraphModule({}, graph), forward_outputs=2))
    assert joint.backward == (slope, twice, back)
    assert joint.forward == (sine, needed)
    assert [entry.node for entry in joint.saved] == [first]


def test_items_go_with_their_container() -> None:
    graph = Graph()
    first, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    both = graph.call_function(ATEN.native_dropout.default, (first, 0.5, True))
    kept, mask = (graph.call_function(operator.getitem, (both, place)) for place in range(2))
    mask.meta["partitioner_tag"] = "is_backward"
    back = graph.call_function(ATEN.native_dropout_backward.default, (tangent, mask, 2.0))
    graph.output([kept, back])
    both.meta["val"] = torch.empty(4, 4), torch.empty(4, 4, dtype=torch.bool)
    kept.meta["val"], mask.meta["val"] = both.meta["val"]
    joint = _joint(Program.of(GraphModule({}, graph), forward_outputs=1))
    assert joint.forward == (both, kept, mask)
    assert [(entry.nodes, entry.bytes) for entry in joint.saved] == [((mask,), 16)]


def _bytes_that_autograd_saves(model: nn.Module, *args: Tensor) -> int:
    """The bytes of all storages that autograd saves in a forward, but for those of arguments and parameters."""
    own = {value.untyped_storage().data_ptr() for value in (*args, *model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(*args)
    assert result.requires_grad
    return sum(tensor.untyped_storage().nbytes() for where, tensor in saved.items() if where not in own)


class Head(nn.Module):
    """Attention of one head, from one projection that is split in three."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return (functional.softmax(query @ key.transpose(1, 2), dim=-1) @ value).tanh()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.out = nn.Linear(8, 10)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.out(functional.gelu(self.embed(ids)))
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (Stack(), (X,)),
        (Head(), (X,)),
        (Classifier(), (torch.arange(10).view(2, 5),)),
        (nn.Sequential(nn.Conv1d(3, 5, 3), nn.GroupNorm(1, 5), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten()), (X,)),
        (nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.0), nn.Softplus(), nn.LogSoftmax(-1)), (X,)),
    ],
    ids=["stack", "attention", "classifier", "convolution", "softplus"],
)
def test_what_is_saved_is_what_autograd_saves(model: nn.Module, args: tuple[Tensor, ...]) -> None:
    assert _joint(partita.capture_joint(model, args)).saved_bytes == _bytes_that_autograd_saves(model, *args)


def test_views_of_one_storage_are_saved_once_and_as_a_whole() -> None:
    joint = _joint(partita.capture_joint(Head(), (X,)))
    whole = [entry for entry in joint.saved if entry.bytes == 4 * 3 * 24 * 4]
    assert len(whole) == 1, "query, key and value are parts of one projection"
    assert len(whole[0].nodes) == 3
    storages = [node.meta["val"].untyped_storage()._cdata for entry in joint.saved for node in entry.nodes[:1]]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_views_share_although_a_tracer_gives_each_value_a_storage(tracing_mode: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        made = (x @ w).sin()
        one, other = made.chunk(2)
        return one.t() * other.t()

    traced = _by_hand(function, torch.randn(4, 3), torch.randn(3, 3), tracing_mode=tracing_mode)
    joint = _joint(Program.of(traced, forward_outputs=1))
    assert joint.saved_bytes == 2 * 4 * 3 * 4  # The product, for the cosine, and its sine, for the two halves.
    assert joint.saved_input_bytes == (4 * 3 + 3 * 3) * 4


def test_an_expanded_value_is_as_large_as_its_memory() -> None:
    class Expands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.exp().expand(100, 3) * x * x

    saved = _joint(partita.capture_joint(Expands(), (torch.randn(100, 3),))).saved
    assert sorted(entry.bytes for entry in saved if not entry.is_input) == [3 * 4]


def test_symbolic_sizes_are_not_known() -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return (x @ w).sin().sum()

    traced = _by_hand(Sized(), torch.randn(4, 3), torch.randn(3, 3), tracing_mode="symbolic")
    assert _joint(Program.of(traced, forward_outputs=1)).saved_bytes is None


def test_other_programs_have_no_halves() -> None:
    assert partita.capture(Stack(), (X,)).joint is None
    assert Program.of(torch.fx.symbolic_trace(Stack())).joint is None


def test_rewriting_and_annotating_keep_the_halves() -> None:
    program = partita.capture_joint(Stack(), (X,))
    policy = ByModule("blocks.*", classes=Block)
    before, marked = _joint(program), partita.plan(program, policy, Mark("region")).annotate()
    after = _joint(marked)
    for part in ("inputs", "tangents", "forward", "backward", "mutated"):
        assert _names(getattr(after, part)) == _names(getattr(before, part))
    assert after.state == before.state
    assert [(_names(entry.nodes), entry.bytes) for entry in after.saved] == [
        (_names(entry.nodes), entry.bytes) for entry in before.saved
    ]
    assert {node.meta["region"] for node in after.forward if "region" in node.meta} == {
        f"blocks_{place}" for place in range(4)
    }
    assert not any("region" in node.meta for node in (*after.backward, *before.forward))
    cut = _joint(partita.plan(program, policy, Call()).apply())
    assert cut.saved_bytes == before.saved_bytes
    assert len([node for node in cut.forward if node.op == "call_module"]) == 4
    assert _joint(partita.inline(partita.plan(program, policy, Call()).apply())).saved_bytes == before.saved_bytes
    assert Program.of(program) is program


def test_a_cut_that_mixes_the_halves_has_no_halves() -> None:
    program = partita.capture_joint(nn.Linear(8, 8), (X,))
    joint = _joint(program)
    region = Region("both", (joint.forward[-1], joint.backward[0]))
    cut = partita.outline(Partition(program, [region]))
    with pytest.raises(SignatureError, match=r"depends on the tangent 'tangents_1'.*both halves"):
        _ = cut.joint


def _graph(*inputs: str, outputs: int = 2) -> GraphModule:
    graph = Graph()
    placeholders = [graph.placeholder(name) for name in inputs]
    sines = [graph.call_function(ATEN.sin.default, (placeholders[at % len(inputs)],)) for at in range(outputs)]
    graph.output(tuple(sines))
    return GraphModule({}, graph)


@pytest.mark.parametrize(
    ("graph_module", "forward_outputs", "kind", "message"),
    [
        (_graph("x", "w"), 1, SignatureError, "none of the inputs 'x', 'w' is a tangent"),
        (_graph("primals_1", "tangents_1"), 3, SignatureError, "has 2 outputs, so its forward cannot have 3"),
        (_graph("primals_1", "tangents_1"), 2, SignatureError, "none a gradient"),
        (_graph("tangents_1", "primals_1"), 1, SignatureError, "'sin_default' of the forward depends on the tangent"),
        (_graph("primals_1", "tangents_1"), 0, OptionError, "at least 1, not 0"),
        (_graph("primals_1", "tangents_1"), True, OptionError, "at least 1, not True"),
        (_graph("primals_1", "tangents_1"), "1", OptionError, "num_fwd_outputs"),
        (torch.export.export(nn.ReLU(), (X,)), 1, OptionError, "not a ExportedProgram; omit forward_outputs"),
        (nn.ReLU(), 1, OptionError, "not a ReLU"),
    ],
)
def test_what_is_no_joint_graph_is_refused(
    graph_module: Any, forward_outputs: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Program.of(graph_module, forward_outputs=forward_outputs)


def test_many_inputs_without_a_tangent_are_not_all_listed() -> None:
    with pytest.raises(SignatureError, match="'a', 'b', 'c', 'd' and 2 more is a tangent"):
        Program.of(_graph(*"abcdef"), forward_outputs=1)


def test_a_policy_in_the_forward_sees_no_node_of_the_backward() -> None:
    program = partita.capture_joint(Stack(depth=2), (X,))
    joint, seen = _joint(program), list[str]()

    def label(node: torch.fx.Node) -> str:
        seen.append(node.name)
        return "all"

    plan = partita.plan(program, InForward(ByLabel(label)), Call())
    assert seen == _names(joint.forward)
    [region] = plan.partition
    assert region.nodes == joint.forward
    assert {plan.partition.reasons[node] for node in joint.backward} == {"it belongs to the backward"}
    inputs = (*(torch.randn(node.meta["val"].shape) for node in (*joint.inputs, *joint.tangents)),)
    partita.verify(program, plan.apply(), inputs)


@pytest.mark.parametrize(
    "policy",
    [BySize(parts=3), ByCapability(lambda node: None), ByModule("blocks.*")],
    ids=["size", "capability", "module"],
)
def test_policies_work_in_the_forward(policy: Any) -> None:
    program = partita.capture_joint(Stack(dropout=0.5), (X,))
    partition = InForward(policy)(program)
    assert len(partition) > 0
    assert {node for region in partition for node in region.nodes} <= set(_joint(program).forward)


def test_mutations_that_wait_for_the_backward_are_excluded_from_regions() -> None:
    graph = Graph()
    weight, state, tangent = (graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1"))
    product = graph.call_function(ATEN.mul.Tensor, (weight, state))
    back = graph.call_function(ATEN.addcmul.default, (tangent, product, state))
    write = graph.call_function(ATEN.copy_.default, (state, product))
    graph.output([product, back, None])
    program = Program.of(GraphModule({}, graph), forward_outputs=1)
    assert _joint(program).forward == (product, write)
    with pytest.raises(CycleError, match="by their effects"):
        Partition(program, [Region("all", (product, write))])
    partition = InForward(ByLabel(lambda node: "all"))(program)
    assert [region.nodes for region in partition] == [(product,)]
    assert partition.reasons[write] == "it must run after some of the backward"


def test_the_forward_alone_gives_what_the_forward_gives() -> None:
    model = Stack(depth=1)
    program = partita.capture_joint(model, (X,))
    joint, part = _joint(program), forward_part(program)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        [loss] = part.program.module()(*(parameters[name] for name in joint.state), X)
        assert torch.equal(loss, model(X))
    assert [part.original[node] for node in part.program.operators()] == list(joint.forward)
    assert all(part.copies[part.original[node]] is node for node in part.program.operators())


def test_only_joint_graphs_have_a_forward() -> None:
    with pytest.raises(OptionError, match="only a joint graph"):
        InForward(BySize(parts=2))(partita.capture(Stack(), (X,)))
    with pytest.raises(OptionError, match="InForward takes a policy"):
        InForward(BySize)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="a policy returns a Partition, not NoneType"):
        InForward(lambda program: None)(partita.capture_joint(Stack(), (X,)))  # type: ignore[arg-type,return-value]


def test_results_of_regions_in_the_forward_alone_are_what_the_forward_reads() -> None:
    program = partita.capture_joint(Stack(depth=2), (X,))
    partition = ByModule("blocks.*", classes=Block)(program)
    alone = forward_alone(partition)
    assert alone is not None
    seen, original = alone
    assert [region.name for region in seen] == [region.name for region in partition]
    assert [_names(region.outputs()) for region in seen] == [["add"], ["add_1"]]
    assert [tuple(original[node] for node in region.nodes) for region in seen] == [region.nodes for region in partition]
    assert forward_alone(ByLabel(lambda node: "all")(program)) is None
    assert forward_alone(ByLabel(lambda node: "all")(partita.capture(Stack(), (X,)))) is None
