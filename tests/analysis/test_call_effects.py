"""What single nodes may do, in the four forms in which tracers write them down."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita.analysis.effects.calls import CallEffects, Effects
from partita.analysis.effects.terms import UNKNOWN, nodes_in_slots
from partita.hops import wrap

A = torch.ops.aten
X, Y, Z = "xyz"  # Stand for the three inputs in the tables below.


def told(
    op: str, target: Any, *args: Any, root: nn.Module | None = None, pure: Any = (), **kwargs: Any
) -> tuple[Node, Effects]:
    graph = Graph()
    inputs = {name: graph.placeholder(name) for name in "xyz"}
    swap = lambda value: _swapped(value, inputs)  # noqa: E731
    node = graph.create_node(op, target, swap(args), swap(kwargs))
    graph.output(node)
    return node, CallEffects(GraphModule(root or nn.Module(), graph), frozenset(pure)).of(node)


def _swapped(value: Any, inputs: dict[str, Node]) -> Any:
    if isinstance(value, str):
        return inputs.get(value, value)
    if isinstance(value, tuple | list):
        return type(value)(_swapped(item, inputs) for item in value)
    return {key: _swapped(item, inputs) for key, item in value.items()} if isinstance(value, dict) else value


def written(node: Node, behaviour: Effects) -> str:
    return "".join(sorted({given.name for given in nodes_in_slots(node, behaviour.mutates)}))


def shared(node: Node, behaviour: Effects) -> str:
    return "".join(sorted({given.name for given in nodes_in_slots(node, behaviour.aliases)}))


def test_functions_that_only_compute():
    norm = (X, None, None, Y, Z)
    for target, *args in (
        (torch.add, X, Y),
        (torch.sort, X),
        (torch.empty, 3),
        (torch.cat, [X, Y]),
        (A.mm.default, X, Y),
        (A.add, X, Y),
        (F.relu, X),
        (F.softmax, X, -1),
        (F.max_pool2d, X, 2),
        (F.cross_entropy, X, Y),
        (F.embedding, X, Y),
        (F.batch_norm, X, Y, Z),
        (F.instance_norm, X, Y, Z, None, None, False),
        (A.batch_norm.default, *norm, False, 0.1, 1e-5, True),
        (A._native_batch_norm_legit.default, *norm, False, 0.1, 1e-5),
        (F.scaled_dot_product_attention, X, Y, Z),
        (A.scaled_dot_product_attention.default, X, Y, Z),
        (A.rrelu.default, X),
        (torch.norm, X),
        (operator.sub, X, Y),
        (operator.neg, X),
        (math.sqrt, X),
        (len, X),
        (torch.sym_max, X, Y),
        (torch.is_grad_enabled,),
        (torch._C._get_tracing_state,),
        (torch._C._log_api_usage_once, "name"),
        (torch.compiler.is_compiling,),
        (A.sym_size.int, X, 0),
    ):
        assert told("call_function", target, *args)[1] == Effects(), target


def test_results_that_may_share_storage():
    for op, target, args, expected in (
        ("call_function", A.view.default, (X, [3]), X),
        ("call_function", torch.reshape, (X, (3,)), X),
        ("call_function", A._unsafe_view.default, (X, [3]), X),
        ("call_function", torch.split, (X, 2), X),
        ("call_function", torch.einsum, ("ii->i", X), X),
        ("call_function", torch.broadcast_tensors, (X, Y), X + Y),
        ("call_function", F.dropout, (X, 0.5, False), X),
        ("call_function", A.dropout.default, (X, 0.5, False), X),
        ("call_function", torch.dropout, (X, 0.0, True), X),
        ("call_function", operator.getitem, (X, 0), X),
        ("call_function", operator.add, ((X,), (Y,)), X + Y),
        ("call_function", getattr, (X, "data"), X),
        ("call_function", max, (X, Y), X + Y),
        ("call_method", "view", (X, 3), X),
        ("call_method", "to", (X, torch.float), X),
        ("call_method", "float", (X,), X),
        ("call_method", "type_as", (X, Y), X + Y),
        ("call_method", "detach", (X,), X),
    ):
        node, behaviour = told(op, target, *args)
        assert (shared(node, behaviour), behaviour.is_effectful) == (expected, False), target


def test_a_generator_that_is_passed_is_not_the_default_one():
    for is_own, op, target, args, kwargs in (
        (True, "call_function", torch.rand, (3,), {"generator": X}),
        (True, "call_function", torch.poisson, (X, Y), {}),
        (True, "call_function", A.rrelu.default, (X, 0.1, 0.9, True, Y), {}),
        (True, "call_function", nn.init.normal_, (X,), {"generator": Y}),
        (True, "call_method", "bernoulli_", (X,), {"generator": Y}),
        (False, "call_function", torch.rand, (3,), {}),
        (False, "call_function", torch.poisson, (X, None), {}),
        (False, "call_function", torch.bernoulli, (X, 0.5), {}),
        (False, "call_method", "normal_", (X, 0.0, 1.0), {"generator": None}),
    ):
        effects = told(op, target, *args, **kwargs)[1]
        assert (effects.uses_rng, effects.own_generator) == (True, is_own), (target, args)


def test_calls_that_write():
    norm = (X, None, None, Y, Z)
    for op, target, args, kwargs, expected in (
        ("call_function", torch.add, (X, Y), {"out": Z}, Z),
        ("call_function", torch.max, (X, 0), {"out": (Y, Z)}, Y + Z),
        ("call_function", A.add.out, (X, Y), {"out": Z}, Z),
        ("call_function", A.max.dim_max, (X, 0), {"max": Y, "max_values": Z}, Y + Z),
        ("call_function", F.normalize, (X, 2.0, 1, 1e-12, Z), {}, Z),
        ("call_function", torch.relu_, (X,), {}, X),
        ("call_function", torch.Tensor.add_, (X, Y), {}, X),
        ("call_function", A.copy_.default, (X, Y), {}, X),
        ("call_function", F.relu, (X,), {"inplace": True}, X),
        ("call_function", F.relu, (X, True), {}, X),
        ("call_function", F.embedding, (X, Y, None, 1.0), {}, Y),
        ("call_function", F.batch_norm, (X, Y, Z), {"training": True}, Y + Z),
        ("call_function", F.instance_norm, (X, Y, Z), {}, Y + Z),
        ("call_function", A.batch_norm.default, (*norm, True, 0.1, 1e-5, True), {}, Y + Z),
        ("call_function", A.native_batch_norm.default, (*norm, True, 0.1, 1e-5), {}, Y + Z),
        ("call_function", torch.instance_norm, (*norm, True, 0.1, 1e-5, True), {}, Y + Z),
        ("call_function", torch._foreach_add_, ([X, Y], 1), {}, X + Y),
        ("call_function", operator.iadd, (X, Y), {}, X),
        ("call_function", operator.setitem, (X, 0, Y), {}, X),
        ("call_function", setattr, (X, "data", Y), {}, X),
        ("call_method", "add_", (X, Y), {}, X),
        ("call_method", "requires_grad_", (X,), {}, X),
        ("call_method", "resize_", (X, 3), {}, X),
        ("call_method", "set_", (X, Y), {}, X),
        ("call_method", "__setitem__", (X, 0, Y), {}, X),
        ("call_method", "__iadd__", (X, Y), {}, X),
        ("call_method", "append", (X, Y), {}, X),
        ("call_function", nn.init.ones_, (X,), {}, X),
    ):
        node, behaviour = told(op, target, *args, **kwargs)
        assert (written(node, behaviour), behaviour.unknown) == (expected, False), target


def test_what_is_put_into_a_list_stays_alive_in_it_but_a_tensor_copies():
    assert shared(*told("call_method", "append", X, Y)) == X + Y
    assert shared(*told("call_method", "set_", X, Y)) == X + Y
    assert shared(*told("call_function", operator.setitem, X, "key", Y)) == X + Y
    assert shared(*told("call_function", operator.setitem, X, slice(None), Y)) == X


@pytest.mark.parametrize(
    ("op", "target", "args"),
    [
        ("call_function", torch.rand, (3,)),
        ("call_function", A.rand_like.default, (X,)),
        ("call_function", torch.dropout, (X, 0.5, True)),
        ("call_function", F.dropout, (X,)),
        ("call_function", F.dropout, (X, Y)),
        ("call_function", F.alpha_dropout, (X, 0.5, True)),
        ("call_function", F.rrelu, (X, 0.1, 0.3, True)),
        ("call_function", F.gumbel_softmax, (X,)),
        ("call_function", F.fractional_max_pool2d, (X, 2, 2)),
        ("call_function", F.scaled_dot_product_attention, (X, Y, Z, None, 0.5)),
        ("call_function", A.native_dropout.default, (X, 0.0, True)),
        ("call_function", A.bernoulli_.float, (X,)),
        ("call_function", torch.manual_seed, (0,)),
        ("call_function", torch.get_rng_state, ()),
        ("call_function", torch.svd_lowrank, (X,)),
        ("call_function", nn.init.normal_, (X,)),
        ("call_method", "normal_", (X,)),
        ("call_method", "multinomial", (X, 1)),
        ("call_method", "manual_seed", (X, 0)),
    ],
)
def test_calls_that_draw(op, target, args):
    behaviour = told(op, target, *args)[1]
    assert (behaviour.uses_rng, behaviour.unknown) == (True, False)


@pytest.mark.parametrize(
    "target",
    [
        torch._assert,
        torch._check,
        torch._assert_async,
        print,
        A._assert_async.msg,
        A._assert_scalar.default,
        A._assert_tensor_metadata.default,
        A.sym_constrain_range_for_size.default,
        A._print.default,
        torch.ops.higher_order.print,
    ],
)
def test_calls_that_are_seen_from_outside(target):
    behaviour = told("call_function", target, X)[1]
    assert (behaviour.impure, behaviour.unknown, behaviour.mutates, behaviour.uses_rng) == (True, False, (), False)


@pytest.mark.parametrize(
    "target",
    [
        torch._C._functorch._vmap_increment_nesting,
        torch._C._functorch._grad_decrement_nesting,
        torch._functorch.predispatch._vmap_increment_nesting,
        getattr(torch._functorch.predispatch, "_exit_dual_level", torch._C._functorch._vmap_decrement_nesting),
        torch.set_default_dtype,
        torch.autograd.grad,
    ],
)
def test_calls_that_change_how_all_others_run(target):
    assert told("call_function", target, X)[1].fences


def test_functorch_wrappers_only_alias():
    node, behaviour = told("call_function", torch._C._functorch._add_batch_dim, X, 0, 1)
    assert (shared(node, behaviour), behaviour.is_effectful) == (X, False)


def test_python_functions_are_unknown_unless_declared_pure():
    def mystery(x: Any) -> Any:
        return x

    node, behaviour = told("call_function", mystery, X)
    assert behaviour.unknown
    assert written(node, behaviour) == X
    node, behaviour = told("call_function", mystery, X, pure=[mystery])
    assert (shared(node, behaviour), behaviour.is_effectful) == (X, False)


def test_collectives_communicate_and_waits_complete_their_argument():
    functional = torch.ops._c10d_functional
    node, behaviour = told("call_function", functional.all_reduce.default, X, "sum", "0")
    assert (behaviour.communicates, written(node, behaviour), shared(node, behaviour)) == (True, "", "")
    node, behaviour = told("call_function", functional.wait_tensor.default, X)
    assert (behaviour.waits, behaviour.communicates, written(node, behaviour)) == (True, False, X)


class Mystery(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(2, 2), ""),
        (nn.ReLU(), ""),
        (nn.ReLU(inplace=True), "mutates"),
        (nn.Dropout(0.5), "uses_rng"),
        (nn.Dropout(0.0), ""),
        (nn.Dropout(0.5).eval(), ""),
        (nn.BatchNorm1d(2), "mutated_state"),
        (nn.BatchNorm1d(2).eval(), ""),
        (nn.BatchNorm1d(2, track_running_stats=False), ""),
        (nn.InstanceNorm1d(2), ""),
        (nn.InstanceNorm1d(2, track_running_stats=True), "mutated_state"),
        (nn.InstanceNorm1d(2, track_running_stats=True).eval(), ""),
        (nn.Embedding(2, 2), ""),
        (nn.Embedding(2, 2, max_norm=1.0), "mutated_state"),
        (nn.RReLU(), "uses_rng"),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.5), "uses_rng"),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.5).eval(), ""),
        (nn.MultiheadAttention(2, 1, dropout=0.5), "uses_rng"),
        (nn.TransformerEncoderLayer(2, 1, dropout=0.5), "uses_rng"),
        (nn.TransformerEncoderLayer(2, 1, dropout=0.5).eval(), ""),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), "uses_rng"),
        (Mystery(2, 2), "unknown"),
        (nn.Sequential(nn.Linear(2, 2), Mystery(2, 2)), "unknown"),
        (nn.LazyLinear(2), "unknown"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), "unknown"),
    ],
)
def test_modules(module, expected):
    root = nn.Module()
    root.child = module
    behaviour = told("call_module", "child", X, root=root)[1]
    done = [name for name in ("mutates", "mutated_state", "uses_rng") if getattr(behaviour, name)]
    assert ("unknown" if behaviour.unknown else " ".join(done)) == expected


def test_a_module_with_a_hook_is_unknown():
    root = nn.Module()
    root.child = nn.Linear(2, 2)
    root.child.register_forward_hook(lambda module, args, output: None)
    assert told("call_module", "child", X, root=root)[1].unknown


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x.sin()


class _Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1


def _exported(model: nn.Module, **options: bool) -> nn.Module:
    root = nn.Module()
    root.child = torch.export.export(model, (torch.ones(3),)).module(**options)
    return root


@pytest.mark.parametrize("check_guards", [True, False])
def test_the_module_of_an_exported_program_does_what_its_graph_does(check_guards):
    assert not told("call_module", "child", X, root=_exported(_Sine(), check_guards=check_guards))[1].is_effectful
    root = _exported(_Counting(), check_guards=check_guards)
    behaviour = told("call_module", "child", X, root=root)[1]
    assert not behaviour.unknown
    assert [tensor is root.child.calls for tensor in behaviour.mutated_state] == [True]


def test_a_hook_of_the_user_on_the_module_of_an_exported_program_is_unknown():
    root = _exported(_Sine())
    root.child.register_forward_hook(lambda module, args, output: None)
    assert told("call_module", "child", X, root=root)[1].unknown


def _body(write: str | None, returned: int) -> GraphModule:
    graph = Graph()
    inputs = [graph.placeholder("a"), graph.placeholder("b")]
    if write is not None:
        graph.call_method("add_", (inputs[0 if write == "a" else 1], 1))
    graph.output((graph.call_function(torch.neg, (inputs[0],)) if returned < 0 else inputs[returned],))
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(("write", "returned"), [("a", 1), ("b", -1), (None, 0), (None, -1)])
def test_a_call_does_what_its_body_does_to_its_operands(write, returned):
    root = nn.Module()
    root.body = _body(write, returned)
    expected = ({"a": X, "b": Y, None: ""}[write], {0: X, 1: Y, -1: ""}[returned])
    node, behaviour = told("call_module", "body", X, Y, root=root)
    assert (written(node, behaviour), shared(node, behaviour)) == expected
    node, behaviour = told("call_module", "body", X, root=root, b=Y)
    assert (written(node, behaviour), shared(node, behaviour)) == expected
    node, behaviour = _operator_call(root, torch.ops.higher_order.wrap_with_set_grad_enabled, False)
    assert (written(node, behaviour), shared(node, behaviour)) == expected


def test_an_operator_whose_body_is_not_known_is_unknown():
    assert told("call_function", torch.ops.higher_order.cond, X, Y, Z, ())[1].unknown


def _operator_call(root: nn.Module, operator: Any, *leading: Any) -> tuple[Node, Effects]:
    graph = Graph()
    x, y, body = graph.placeholder("x"), graph.placeholder("y"), graph.get_attr("body")
    node = graph.call_function(operator, (*leading, body, x, y))
    graph.output(node)
    return node, CallEffects(GraphModule(root, graph)).of(node)


@torch.library.custom_op("partita_tests::scale_", mutates_args=("x",))
def scale_(x: torch.Tensor, y: torch.Tensor) -> None:
    x.mul_(y)


def test_custom_operators_are_believed():
    for target in (torch.ops.partita_tests.scale_.default, torch.ops.partita_tests.scale_):
        node, behaviour = told("call_function", target, X, Y)
        assert (written(node, behaviour), behaviour.impure, behaviour.unknown) == (X, False, False)


@pytest.mark.parametrize("name", ["wait", "fill", "embedding", "conv2d", "linear"])
def test_a_method_that_no_tensor_has_is_unknown(name: str) -> None:
    graph = Graph()
    call = graph.call_method(name, (graph.placeholder("handle"),))
    graph.output(call)
    assert CallEffects(GraphModule(nn.Module(), graph)).of(call) == UNKNOWN


def test_bodies_may_be_nested_deep() -> None:
    """A recursion would take ten frames a level."""
    body: nn.Module = told("call_function", A.mul_.Tensor, X, 2)[0].graph.owning_module
    assert isinstance(body, GraphModule)
    for _ in range(130):
        root, graph = nn.Module(), Graph()
        root.body = body
        inputs = [graph.placeholder(name) for name in "xyz"]
        graph.output(graph.call_function(wrap, (graph.get_attr("body"), *inputs)))
        body = GraphModule(root, graph)
    node = next(iter(body.graph.find_nodes(op="call_function", target=wrap)))
    assert written(node, CallEffects(body).of(node)) == "x"
