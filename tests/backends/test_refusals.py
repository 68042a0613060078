"""What compilers that trace refuse: by name, with the reason, and nothing else."""

from __future__ import annotations

import logging
import operator
from typing import Any

import pytest
import torch
from tests.backends.helpers import call
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.nn import functional

import partita
from partita.backends import AotEager, AotInductor, Eager, Inductor, refusals
from partita.backends.refusals import ALIASED_FOREACH, MULTILABEL
from partita.policies import BySize
from partita.testing import CAPTURES, captured_case, random_case
from partita.treatments import Lower

aten = torch.ops.aten
TRACING = (AotEager(), Inductor(), AotInductor())


@torch.library.custom_op("partita_tests::without_meta", mutates_args=())
def without_meta(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@torch.library.custom_op("partita_tests::with_meta", mutates_args=())
def with_meta(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@with_meta.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("partita_tests::only_writes", mutates_args=("x",))
def only_writes(x: torch.Tensor) -> None:
    x.add_(1)


class Printing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("hello")
        return x


def _hooked() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    return layer


def _twice(x: Any) -> Any:
    return x * 2


def _printed(x: Any) -> Any:
    """While it is traced, a call of `print`."""
    x.tracer.create_proxy("call_function", print, (x,), {})
    return x


def _body(function: Any) -> GraphModule:
    return symbolic_trace(function)


def _sparse() -> torch.Tensor:
    return torch.eye(2).to_sparse()


MASK = torch.tensor([True, False])
PLACES = torch.tensor([0, 1])

REFUSED: dict[str, tuple[Node, str]] = {
    "operator without a meta kernel": (call(torch.ops.partita_tests.without_meta.default, "x"), "no meta kernel"),
    "aten operator without one": (call(aten._ctc_loss.Tensor, "x", "x", "x", "x"), "no meta kernel"),
    "nonzero": (call(aten.nonzero.default, "x"), "size depends on data"),
    "nonzero as a function": (call(torch.nonzero, "x"), "size depends on data"),
    "nonzero as a method": (call("nonzero", "x"), "size depends on data"),
    "where with a condition only": (call(torch.where, "x"), "size depends on data"),
    "unique": (call(torch.unique, "x"), "size depends on data"),
    "masked select": (call(aten.masked_select.default, "x", "x"), "size depends on data"),
    "index with a mask": (call(aten.index.Tensor, "x", ["x"], values=(PLACES, MASK)), "size depends on data"),
    "equal": (call(torch.equal, "x", "x"), "value depends on data"),
    "is_nonzero": (call(aten.is_nonzero.default, "x"), "value depends on data"),
    "tolist": (call("tolist", "x"), "exposes data to Python"),
    "numpy": (call("numpy", "x"), "exposes data to Python"),
    "print": (call(print, "x"), "side effect"),
    "Python assertion": (call(torch._assert, "x", "message"), "side effect"),
    "check of data without a message": (call(aten._assert_async.default, "x"), "side effect"),
    "profiler range": (call(torch.ops.profiler._record_function_enter_new.default, "name"), "side effect"),
    "unknown function": (call(_twice, "x"), "unknown Python function"),
    "logging": (call(logging.warning, "x"), "unknown Python function"),
    "unknown method": (call("go_home", "x"), "unknown method"),
    "unknown module": (call(Printing(), "x"), "unknown module"),
    "module with a hook": (call(_hooked(), "x"), "unknown module"),
    "sparse by name": (call("to_sparse", "x"), "sparse tensor"),
    "sparse input": (call(torch.mm, "x", "x", values=(_sparse(), torch.eye(2))), "sparse tensor"),
    "quantized by name": (call(torch.quantize_per_tensor, "x", 0.1, 0, torch.quint8), "quantized tensor"),
    "quantized operator": (call(torch.ops.quantized.add.default, "x", "x", 1.0, 0), "quantized tensor"),
    "mkldnn by name": (call("to_mkldnn", "x"), "mkldnn tensor"),
    "mkldnn input": (call("to_dense", "x", values=(torch.eye(2).to_mkldnn(),)), "mkldnn tensor"),
    "nested input": (
        call(torch.sin, "x", values=(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),)),
        "nested tensor",
    ),
    "autograd": (call(torch.autograd.grad, "x", "x"), "autograd inside the graph"),
    "backward": (call("backward", "x"), "autograd inside the graph"),
    "requires_grad_": (call("requires_grad_", "x"), "autograd inside the graph"),
    "reading a gradient": (call(getattr, "x", "grad"), "autograd inside the graph"),
    "generator": (call(torch.rand, 2, generator="x"), "uses its own random number generator"),
    "lstm": (call(nn.LSTM(2, 2), "x"), "lstm: its backward fails when traced"),
    "lstm in a module": (call(nn.Sequential(nn.LSTM(2, 2)), "x"), "lstm: its backward fails when traced"),
    "lstm operator": (call(aten.lstm.input, "x", ["x"], ["x"]), "lstm: its backward fails when traced"),
    "gru with dropout": (call(nn.GRU(2, 2, 2, dropout=0.5), "x"), "dropout that a trace loses"),
    "rnn in a module": (call(nn.Sequential(nn.RNN(2, 2, 2, dropout=0.5)), "x"), "dropout that a trace loses"),
    "gru operator": (
        call(aten.gru.input, "x", "x", ["x"], True, 2, 0.5, True, False, False),
        "dropout that a trace loses",
    ),
    "packed rnn operator": (
        call(aten.rnn_tanh.data, "x", "x", "x", ["x"], True, 2, 0.5, True, False),
        "dropout that a trace loses",
    ),
    "rnn function": (
        call(torch.rnn_relu, "x", "x", ["x"], True, 2, 0.5, True, False, False),
        "dropout that a trace loses",
    ),
    "packed gru function": (
        call(torch.gru, "x", "x", "x", ["x"], True, 2, 0.5, True, False),
        "dropout that a trace loses",
    ),
    "gru whose dropout is a node": (
        call(torch.gru, "x", "x", ["x"], True, 2, "x", True, False, False),
        "dropout that a trace loses",
    ),
    "native dropout": (call(aten.native_dropout.default, "x", 0.5, None), "dropout that a trace loses"),
    "multilabel loss": (call(functional.multilabel_margin_loss, "x", "x"), MULTILABEL),
    "multilabel loss as an operator": (call(aten.multilabel_margin_loss.default, "x", "x"), MULTILABEL),
    "multilabel loss in a module": (call(nn.Sequential(nn.MultiLabelMarginLoss()), "x"), MULTILABEL),
    "views in secret": (call(torch.unsafe_chunk, "x", 2), "its results share memory, which a trace does not see"),
    "views in secret by a method": (
        call("unsafe_split", "x", 2),
        "its results share memory, which a trace does not see",
    ),
    "other memory": (call(aten.set_.source_Tensor, "x", "x"), "its results share memory, which a trace does not see"),
    "shape in place": (call("t_", "x"), "reshapes a tensor in place"),
    "size in place": (call("resize_", "x", (2, 2)), "reshapes a tensor in place"),
    "size in place by an operator": (call(aten.resize_as_.default, "x", "x"), "reshapes a tensor in place"),
    "shape in place by an operator": (call(aten.unsqueeze_.default, "x", 0), "reshapes a tensor in place"),
    "graph that prints": (call(_body(lambda x: _printed(x)), "x"), "in its body: side effect"),
}
AOT_EAGER_ONLY: dict[str, Node] = {
    "interpolation": call(functional.interpolate, "x", None, 2, "bilinear"),
    "interpolation by keyword": call(functional.interpolate, "x", scale_factor=2, mode="bicubic"),
    "interpolation in a module": call(nn.Sequential(nn.Upsample(scale_factor=2, mode="linear")), "x"),
    "interpolation operator": call(aten.upsample_trilinear3d.vec, "x", None, True, [2.0, 2.0, 2.0]),
    "softshrink": call(aten.softshrink.default, "x"),
    "margin loss": call(nn.MultiMarginLoss(), "x"),
    "interpolation in a body": call(_body(lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear")), "x"),
}
INDUCTOR_ONLY: dict[str, tuple[Node, str]] = {
    "fused adam": (call(aten._fused_adam_.default, ["x"]), "fused adam is not supported yet"),
    "fused adam with a tensor": (call(aten._fused_adam.tensor_lr, ["x"]), "fused adam is not supported yet"),
    "fused adamw": (call(aten._fused_adamw_.default, ["x"]), "fused adam is not supported yet"),
    "foreach addition": (call(aten._foreach_add.Scalar, ["x"], 1), "scalar foreach addition is not supported yet"),
    "in place": (call(aten._foreach_add_.Scalar, ["x"], 1), "scalar foreach addition is not supported yet"),
    "permutation": (call(torch.randperm, 4), "randperm: Inductor fails where it is an index"),
    "permutation by an operator": (call(aten.randperm.default, 4), "randperm: Inductor fails where it is an index"),
}
TAKEN: dict[str, Node] = {
    "flatten": call(aten.flatten.using_ints, "x"),
    "add": call(aten.add.Tensor, "x", "x"),
    "linear": call(functional.linear, "x", "x"),
    "composite operator": call(aten.linear.default, "x", "x"),
    "operator with a fake function": call(torch.ops.partita_tests.with_meta.default, "x"),
    "operator that only writes": call(torch.ops.partita_tests.only_writes.default, "x"),
    "index with places": call(aten.index.Tensor, "x", ["x"], values=(PLACES, PLACES)),
    "index with places of nobody knows what": call(operator.getitem, "x", 0),
    "slice": call(operator.getitem, "x", slice(1, 2)),
    "where": call(torch.where, "x", "x", "x"),
    "in-place operator": call(operator.iadd, "x", 1),
    "write": call(operator.setitem, "x", 0, 1.0),
    "write by a method": call("add_", "x", 1),
    "dropout": call(functional.dropout, "x", 0.5, True),
    "random numbers": call(torch.rand, 2, generator=None),
    "item": call("item", "x"),
    "size": call("size", "x", 0),
    "fake quantization": call(torch.fake_quantize_per_tensor_affine, "x", 0.1, 0, 0, 255),
    "check of data": call(aten._assert_async.msg, "x", "message"),
    "layer": call(nn.Linear(2, 2), "x"),
    "nearest neighbours": call(functional.interpolate, "x", None, 2),
    "nearest neighbours in a module": call(nn.Upsample(scale_factor=2), "x"),
    "batch norm": call(nn.BatchNorm1d(2), "x"),
    "gru": call(nn.GRU(2, 2), "x"),
    "gru with dropout in evaluation": call(nn.GRU(2, 2, 2, dropout=0.5).eval(), "x"),
    "gru of one layer": call(aten.gru.input, "x", "x", ["x"], True, 1, 0.5, True, False, False),
    "gru without dropout": call(torch.gru, "x", "x", ["x"], True, 2, 0.0, True, False, False),
    "packed gru in evaluation": call(torch.gru, "x", "x", "x", ["x"], True, 2, 0.5, False, False),
    "native dropout in training": call(aten.native_dropout.default, "x", 0.5, True),
    "attention": call(nn.MultiheadAttention(2, 1), "x", "x", "x"),
    "graph": call(_body(lambda x: torch.sin(x)), "x"),
    "foreach addition of tensors": call(aten._foreach_add.List, ["x"], ["x"]),
}


@pytest.mark.parametrize("backend", TRACING, ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", REFUSED)
def test_a_node_is_refused_with_its_reason(backend: Any, name: str) -> None:
    node, reason = REFUSED[name]
    assert backend.refusal(node) == reason


@pytest.mark.parametrize("name", AOT_EAGER_ONLY)
def test_aot_eager_refuses_what_would_round_differently(name: str) -> None:
    node = AOT_EAGER_ONLY[name]
    assert (AotEager().refusal(node) or "").endswith("round differently")
    assert Inductor().refusal(node) is None


@pytest.mark.parametrize("name", INDUCTOR_ONLY)
def test_inductor_refuses_what_it_does_not_support_yet(name: str) -> None:
    node, reason = INDUCTOR_ONLY[name]
    assert (Inductor().refusal(node), AotInductor().refusal(node), AotEager().refusal(node)) == (reason, reason, None)


@pytest.mark.parametrize("backend", TRACING, ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", TAKEN)
def test_a_node_is_taken(backend: Any, name: str) -> None:
    assert backend.refusal(TAKEN[name]) is None


@pytest.mark.parametrize("name", [*REFUSED, *INDUCTOR_ONLY])
def test_eager_refuses_nothing(name: str) -> None:
    assert Eager().refusal({**REFUSED, **INDUCTOR_ONLY}[name][0]) is None


@pytest.mark.parametrize("backend", TRACING, ids=lambda backend: backend.name)
def test_a_foreach_that_may_write_one_tensor_twice_is_refused(backend: Any) -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    view = graph.call_method("view", (x, -1))
    apart = graph.call_function(aten._foreach_mul_.Scalar, ([x, y], 2.0))
    assert backend.refusal(apart) is None
    for tensors in ([x, x], [x, view]):
        twice = graph.call_function(aten._foreach_mul_.Scalar, (tensors, 2.0))
        assert backend.refusal(twice) == ALIASED_FOREACH


def test_an_operator_that_gets_a_meta_kernel_is_taken_from_then_on() -> None:
    @torch.library.custom_op("partita_tests::late", mutates_args=())
    def late(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    node = call(torch.ops.partita_tests.late.default, "x")
    assert Inductor().refusal(node) == "no meta kernel"
    late.register_fake(torch.empty_like)
    assert Inductor().refusal(node) is None


def test_what_is_compared_with_is_known_for_a_mask() -> None:
    module = symbolic_trace(lambda x: (x[x > 0], x[~(x > 0)], x[x.argmax()]))
    reasons = [
        Inductor().refusal(node) for node in module.graph.find_nodes(op="call_function", target=operator.getitem)
    ]
    assert reasons == ["size depends on data", "size depends on data", None]


def test_nodes_between_the_ends_of_a_transform_are_refused() -> None:
    kept: list[GraphModule] = []

    def backend(module: GraphModule, _: Any) -> Any:
        kept.append(module)
        return module

    torch.compiler.reset()
    torch.compile(lambda x: torch.func.vmap(torch.sin)(x.cos()) * 2, backend=backend)(torch.ones(2, 3))
    names = {node: getattr(node.target, "__name__", node.target) for node in kept[0].graph.nodes}
    reasons = {name: Inductor().refusal(node) for node, name in names.items()}
    assert reasons["sin"] == "inside a torch.func transform"
    assert reasons["_vmap_increment_nesting"] == "torch.func transform"
    assert reasons["cos"] is None
    assert reasons["mul"] is None


def test_branches_are_taken_if_all_in_them_is() -> None:
    reasons = []
    for no in (_body(lambda x: torch.sin(x)), _body(lambda x: _printed(x))):
        graph = Graph()
        inputs = (graph.placeholder("condition"), graph.placeholder("x"))
        root = nn.Module()
        root.yes, root.no = _body(lambda x: torch.cos(x)), no
        branches = (graph.get_attr("yes"), graph.get_attr("no"))
        node = graph.call_function(torch.ops.higher_order.cond, (inputs[0], *branches, [inputs[1]]))
        graph.output((node,))
        module = GraphModule(root, graph)
        reasons.append([Inductor().refusal(found) for found in module.graph.nodes if found.op == "call_function"])
    assert reasons == [[None], ["in its body: side effect"]]


def test_every_node_of_any_program_gets_the_same_answer_twice() -> None:
    cases = [random_case(seed) for seed in range(15)] + [captured_case(*pair) for pair in CAPTURES]
    for case in cases:
        for node in case.graph_module.graph.nodes:
            for backend in TRACING:
                answer = backend.refusal(node)
                assert answer is None or (answer and "\n" not in answer)
                assert backend.refusal(node) == answer


def _swaps(a: Tensor, b: Tensor) -> Tensor:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    return a.sum()


def test_a_swap_of_two_inputs_is_not_left_to_inductor() -> None:
    """Inductor drops the copy in between (torch 2.13), so that both inputs get one value."""
    program = partita.capture(_swaps, (torch.ones(3), torch.zeros(3)))
    decided = partita.plan(program, BySize(parts=1), Lower("inductor"))
    a, b = torch.arange(3.0), torch.full((3,), 7.0)
    decided.apply().module()(a, b)
    assert torch.equal(a, torch.full((3,), 7.0))
    assert torch.equal(b, torch.arange(3.0))
    assert "both are mutated" in decided.failures[0].reason


class _VectorTimesBatch(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y


class _Resized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.softshrink(functional.interpolate(x, scale_factor=1.7, mode="bicubic"))


class _Labelled(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.multilabel_margin_loss(x, y)


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (_VectorTimesBatch(), (torch.randn(5), torch.randn(2, 3, 5, 6))),
        (_Resized(), (torch.randn(2, 3, 7, 9),)),
        (_Labelled(), (torch.randn(2, 3), torch.tensor([[0, 2, -1], [1, -1, 0]]))),
    ],
)
def test_what_torch_traces_into_other_operators_keeps_its_bits(model: nn.Module, args: tuple[Tensor, ...]) -> None:
    program = partita.capture(model, args)
    after = partita.plan(program, BySize(parts=1), Lower("aot_eager")).apply()
    partita.verify(program, after, args)


def nested(levels: int, innermost: Any) -> GraphModule:
    """A graph that runs `innermost` on its input, inside of so many operators that run a body."""
    graph, root = Graph(), nn.Module()
    x = graph.placeholder("x")
    if levels:
        root.add_module("body", nested(levels - 1, innermost))
        graph.output(graph.call_function(partita.hops.wrap, (graph.get_attr("body"), x)))
    else:
        graph.output(graph.call_function(innermost, (x,)))
    return GraphModule(root, graph)


def test_bodies_inside_of_bodies_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Node] = []
    name_called = refusals._name_called

    def named(node: Node) -> str:
        looked.append(node)
        return name_called(node)

    monkeypatch.setattr(refusals, "_name_called", named)
    read, wrapped = list(nested(9, aten.relu.default).graph.nodes)[1:3]
    assert refusals.refusal_of_other_bits(wrapped) is None
    assert len(looked) <= 60
    assert AotEager().refusal(read) is None
    assert AotEager().refusal(wrapped) is None


def test_what_rounds_differently_is_found_in_bodies_inside_of_bodies() -> None:
    wrapped = list(nested(9, aten.softshrink.default).graph.nodes)[2]
    assert AotEager().refusal(wrapped) == f"in its body: {refusals.OTHER_BITS}"
