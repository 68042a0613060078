"""Checkpoint operators under tracers: a call that is kept before dispatch, tagged nodes after it, right in both."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tests.recompute.operators.helpers import Block, assert_bitwise, calls_in_backward, every_operator, square, step
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from partita import Program, recompute
from partita.errors import RecomputeError

every_mode = pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
both_ways = pytest.mark.parametrize("strict", [False, True])

AGAIN, SAVED = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE


def _drop(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.5, True)


def _body(x: Tensor, w: Tensor) -> Tensor:
    return _drop(recompute.keep(torch.mm, x, w).sin()) @ w


def _calls(module: GraphModule) -> list[str]:
    graphs = [child.graph for child in module.modules() if isinstance(child, GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return [target.name() for target in targets if isinstance(target, torch._ops.HigherOrderOperator)]


def _tags(module: GraphModule) -> list[tuple[str, Any, Any]]:
    """The calls with their tags, but for those that autograd adds when it saves a result."""
    calls = [node for node in module.graph.nodes if node.op == "call_function" and "detach" not in node.name]
    return [(node.name, node.meta.get("recompute"), node.meta.get("ac_graph_id")) for node in calls]


@every_operator
@every_mode
def test_a_trace_before_dispatch_keeps_the_call_and_trains_like_the_function(operator: Any, tracing_mode: Any) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return operator(_body, x, w=w, preserve_rng_state=True, use_reentrant=False).cos()

    x, w = square(), square()
    traced = make_fx(f, tracing_mode=tracing_mode, pre_dispatch=True)(x, w)
    assert _calls(traced) == [operator.name(), "partita_keep"]
    assert_bitwise(step(traced, [x, w], x, w), step(f, [x, w], x, w))
    plain = calls_in_backward((torch.mm(x, w).sin() @ w).cos())
    assert calls_in_backward(traced(x, w))["mm"] == plain["mm"]


@every_operator
@every_mode
def test_a_trace_after_dispatch_tags_the_nodes_of_each_region(operator: Any, tracing_mode: Any) -> None:
    def f(x: Tensor) -> Tensor:
        first = operator(lambda a: recompute.keep(torch.sin, a).exp(), x.abs()).neg()
        return operator(lambda a: operator(torch.tanh, a.cos()).sqrt(), first).exp()

    traced = make_fx(f, tracing_mode=tracing_mode)(square())
    assert _calls(traced) == []
    names, tags, numbers = zip(*_tags(traced), strict=True)
    assert names == ("abs_1", "sin", "exp", "neg", "cos", "tanh", "sqrt", "exp_1")
    assert tags == (None, SAVED, AGAIN, None, AGAIN, AGAIN, AGAIN, None)
    assert (numbers[0], numbers[3], numbers[-1]) == (None, None, None)
    # Numbers grow in the order in which regions begin, and an inner region has one of its own.
    assert numbers[1] == numbers[2] < numbers[4] == numbers[6] < numbers[5]
    again = _tags(make_fx(f, tracing_mode=tracing_mode)(square()))
    assert min(number for *_, number in again if number) > max(number for number in numbers if number)


@every_operator
def test_nothing_is_tagged_once_the_region_is_over(operator: Any) -> None:
    def failing(x: Tensor) -> Tensor:
        x.sin()
        raise KeyError

    def f(x: Tensor) -> Tensor:
        with pytest.raises(KeyError):
            operator(failing, x)
        return recompute.keep(torch.cos, x)

    assert [tag for name, tag, _ in _tags(make_fx(f)(square())) if name == "cos"] == [None]


@every_operator
def test_a_context_function_tags_node_by_node(operator: Any) -> None:
    context_fn = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    traced = make_fx(partial(operator, lambda x: (x @ x).sin() @ x, context_fn=context_fn))(square())
    assert [(name, tag) for name, tag, _ in _tags(traced)] == [("mm", SAVED), ("sin", AGAIN), ("mm_1", SAVED)]
    assert len({number for *_, number in _tags(traced)}) == 1


@every_operator
def test_a_kept_call_remembers_its_context_function_and_its_choices(operator: Any) -> None:
    context_fn = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    run = partial(operator, lambda x: _drop((x @ x).sin()) @ x, context_fn=context_fn, preserve_rng_state=True)
    traced, x = make_fx(run, pre_dispatch=True)(square()), square()
    (call,) = [node for node in traced.graph.nodes if node.target is operator]
    assert call.kwargs == {"preserve_rng_state": True}
    assert_bitwise(step(traced, [x], x), step(run, [x], x))
    assert calls_in_backward(traced(x))["mm"] == calls_in_backward(run(x))["mm"]
    redrawn = make_fx(partial(operator, _drop, preserve_rng_state=False), pre_dispatch=True)(square(8))
    (call,) = [node for node in redrawn.graph.nodes if node.target is operator]
    assert call.kwargs == {"preserve_rng_state": False}


@every_operator
def test_results_of_any_kind_and_symbols_pass_through_a_kept_call(operator: Any) -> None:
    def body(x: Tensor, rows: int, *, scale: float) -> Any:
        return {"y": x.sin() * scale, "rows": rows + x.shape[1], "none": None}, (x.new_ones(rows),)

    def f(x: Tensor) -> Tensor:
        found, (ones,) = operator(body, x, x.shape[0], scale=0.5)
        assert found["none"] is None
        return found["y"].sum() * found["rows"] + ones.sum()

    traced = make_fx(f, tracing_mode="symbolic", pre_dispatch=True)(torch.ones(3, 4))
    x = torch.randn(5, 7, requires_grad=True)
    assert_bitwise(step(traced, [x], x), step(f, [x], x))


# Export -------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two regions: a block with dropout, and one that keeps a product."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator, self.block, self.weight = operator, Block(), nn.Parameter(square().detach())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.operator(self.block, x, scale=0.5)
        return self.operator(_body, hidden, self.weight).cos()


@every_operator
@both_ways
def test_an_exported_model_keeps_its_regions_and_trains_alike_also_once_saved(operator: Any, strict: bool) -> None:
    model, x = Model(operator), square()
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(model, (x.detach(),), strict=strict, dynamic_shapes=({0: rows},))
    assert _calls(exported.graph_module).count(operator.name()) == 2
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    expected = step(model, [x, *model.parameters()], x)
    for program in (exported, torch.export.load(io.BytesIO(stored.getvalue()))):
        module = program.module()
        parameters = dict(module.named_parameters())
        leaves = [parameters[name] for name, _ in model.named_parameters()]
        assert_bitwise(step(module, [x, *leaves], x), expected)
        with torch.no_grad():
            module(torch.ones(7, 4))


def test_a_decomposed_export_has_the_bodies_in_the_open() -> None:
    exported = torch.export.export(
        Model(recompute.wrap_activation_checkpoint), (square().detach(),)
    ).run_decompositions()
    assert _calls(exported.graph_module) == []


# Other ways to run --------------------------------------------------------------------------------------------------


@every_operator
@both_ways
def test_functionalization_goes_through(operator: Any, strict: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return operator(lambda a: a.sin().clone().add_(1), x).exp()

    x = square()
    assert torch.equal(torch.func.functionalize(f)(x), f(x))
    traced = make_fx(torch.func.functionalize(f), pre_dispatch=strict)(x)
    assert "add_" not in str([node.target for node in traced.graph.nodes])
    assert torch.equal(traced(x), f(x))


@every_operator
def test_fake_tensors_train(operator: Any) -> None:
    with FakeTensorMode() as mode:
        x, w = (mode.from_tensor(torch.ones(3, 3)).requires_grad_() for _ in range(2))
        operator(_body, x, w).sum().backward()
        assert x.grad is not None
        assert (tuple(x.grad.shape), type(x.grad).__name__) == ((3, 3), "FakeTensor")


def _program(operator: Any) -> GraphModule:
    """A graph that reads x, runs a body that draws and one that is kept, and reads x again."""
    graph = Graph()
    x = graph.placeholder("x")
    call = graph.call_function(operator, (graph.get_attr("body"), x), {"w": x})
    graph.output(graph.call_function(torch.add, (call, x)))
    body = make_fx(lambda x, w: _drop(recompute.keep(torch.mm, x, w).sin()) @ w, pre_dispatch=True)(square(), square())
    for node, name in zip(body.graph.find_nodes(op="placeholder"), ("x", "w"), strict=True):
        node.target = name
    body.recompile()
    return GraphModule({"body": body}, graph)


@every_operator
def test_copies_and_pickles_and_interpreters_train_alike(operator: Any) -> None:
    program, x = _program(operator), square()
    expected = step(program, [x], x)
    ways = (copy.deepcopy(program), pickle.loads(pickle.dumps(program)), symbolic_trace(program))
    for way in (*ways, Interpreter(program).run):
        assert_bitwise(step(way, [x], x), expected)
    assert_bitwise(expected, step(lambda x: _body(x, x) + x, [x], x))


@every_operator
def test_a_body_with_a_context_function_can_be_copied_and_pickled(operator: Any) -> None:
    body = symbolic_trace(lambda a: (a @ a).sin() @ a)
    body.meta["_checkpoint_context_fn"] = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    x = square()
    expected = calls_in_backward(operator(body, x))["mm"]
    for way in (copy.deepcopy(body), copy.copy(body)):
        assert calls_in_backward(operator(way, x))["mm"] == expected


@every_operator
def test_dead_code_elimination_keeps_a_call_that_writes(operator: Any) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(operator, (graph.get_attr("body"), x))
    graph.output(x)
    program = GraphModule({"body": symbolic_trace(lambda a: a.add_(1))}, graph)
    program.graph.eliminate_dead_code()
    program.recompile()
    with torch.no_grad():
        assert torch.equal(program(torch.zeros(2)), torch.ones(2))


@every_operator
def test_effects_see_what_a_body_writes(operator: Any) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    before = graph.call_function(torch.sin, (x,))
    graph.call_function(operator, (graph.get_attr("body"), x))
    graph.output((before, graph.call_function(torch.cos, (x,))))
    program = Program.of(GraphModule({"body": make_fx(lambda a: a.add_(1))(torch.ones(2))}, graph))
    names = [node.name for node in program.index.nodes]
    order = {(names[i], names[k]) for i, k in zip(program.effects.before, program.effects.after, strict=True)}
    assert {("sin", operator.name()), (operator.name(), "cos")} <= order
    pure = Program.of(_program(operator))
    assert pure.effects.rng_nodes
    assert not pure.effects.mutated_inputs


# A training step that is traced whole ------------------------------------------------------------------------------


WEIGHT = torch.linspace(-1, 1, 16).reshape(4, 4)


def _twice(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).sin() @ w).tanh()


def _changes_its_own(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin().clone().mul_(2).exp().tanh()


def _keeps(x: Tensor, w: Tensor) -> Tensor:
    return (recompute.keep(torch.mm, x, w).sin() @ w).tanh()


def _casts(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return ((x @ w).sin() @ w).float()


def _nests(x: Tensor, w: Tensor) -> Tensor:
    return recompute.wrap_activation_checkpoint(_twice, (x @ w).tanh(), w).exp().tanh()


def _draws(x: Tensor, w: Tensor) -> Tensor:
    return _drop((x @ w).sin()) @ w


def _writes(x: Tensor, w: Tensor) -> Tensor:
    x.detach().add_(1)
    return _twice(x, w)


def _training_step(body: Any, tracing_mode: Any) -> GraphModule:
    def run(x: Tensor, w: Tensor) -> Any:
        x, w = x.detach().clone().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(body(x * 1, w).sum(), (x, w))

    module = make_fx(run, tracing_mode=tracing_mode)(square().detach(), WEIGHT)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _is_call(node: Node) -> bool:
    return node.op == "call_function"


def _counted(module: GraphModule) -> Counter[str]:
    return Counter(str(node.target).removesuffix(".default") for node in module.graph.nodes if _is_call(node))


@every_operator
@every_mode
@pytest.mark.parametrize("body", [_twice, _changes_its_own, _keeps, _casts, _nests])
def test_a_step_that_is_traced_whole_holds_the_recomputation(operator: Any, tracing_mode: Any, body: Any) -> None:
    plain, recomputed = (_training_step(each, tracing_mode) for each in (body, partial(operator, body)))
    more = _counted(recomputed) - _counted(plain)
    assert more["aten.sin"] >= 1
    x = torch.randn(4, 4)
    assert_bitwise(recomputed(x, WEIGHT), plain(x, WEIGHT))


@every_operator
@every_mode
@pytest.mark.parametrize("body", [_draws, _writes])
def test_what_cannot_be_written_down_twice_occurs_once(operator: Any, tracing_mode: Any, body: Any) -> None:
    plain, recomputed = (_training_step(each, tracing_mode) for each in (body, partial(operator, body)))
    assert not (_counted(recomputed) - _counted(plain)).keys() - {"aten.detach"}
    x, found = torch.randn(4, 4), []
    for module in (plain, recomputed):
        torch.manual_seed(0)
        found.append(module(x.clone(), WEIGHT))
    assert_bitwise(*found)


@every_operator
def test_what_is_kept_occurs_once_in_a_step(operator: Any) -> None:
    kept, all_again = (_counted(_training_step(partial(operator, body), "real")) for body in (_keeps, _twice))
    assert all_again["aten.mm"] - kept["aten.mm"] == 1


@every_operator
def test_contexts_surround_both_runs_in_a_step(operator: Any) -> None:
    entered = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    body = partial(operator, _twice, context_fn=lambda: (noted("first"), noted("again")))
    recomputed = _training_step(body, "real")
    assert entered == ["first", "again"]
    assert_bitwise(recomputed(square().detach(), WEIGHT), _training_step(_twice, "real")(square().detach(), WEIGHT))


@every_operator
def test_torchs_selective_contexts_keep_everything_in_a_step_and_tag(operator: Any) -> None:
    context_fn = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    chosen = _training_step(partial(operator, _twice, context_fn=context_fn), "real")
    assert not (_counted(chosen) - _counted(_training_step(_twice, "real"))).keys() - {"aten.detach"}
    assert {tag for _, tag, _ in _tags(chosen)} == {None, AGAIN, SAVED}


@every_operator
def test_statistics_of_a_norm_are_updated_once_in_a_step(operator: Any) -> None:
    norm = nn.BatchNorm1d(4)

    def run(x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(operator(lambda y: norm(y.sin()).tanh(), x).sum(), x)

    counted = _counted(make_fx(run)(square().detach()))
    assert [count for name, count in counted.items() if name.endswith(("native_batch_norm", "norm_legit"))] == [1]


@every_operator
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_transforms_that_let_nobody_save_otherwise_are_traced_as_they_are(operator: Any, transform: Any) -> None:
    x = square().detach()

    def loss(x: Tensor) -> Tensor:
        return operator(_twice, x, WEIGHT).sum()

    torch.testing.assert_close(make_fx(transform(loss))(x)(x), transform(lambda x: _twice(x, WEIGHT).sum())(x))


@every_operator
def test_a_step_with_second_derivatives_and_a_retained_graph_is_right(operator: Any) -> None:
    def run(call: Any) -> Any:
        def step(x: Tensor) -> Any:
            x = x.detach().requires_grad_()
            result = call(x, WEIGHT).sum()
            (first,) = torch.autograd.grad(result, x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x, retain_graph=True), torch.autograd.grad(result * 2, x)

        return make_fx(step)(square().detach())(square().detach())

    torch.testing.assert_close(run(partial(operator, _twice)), run(_twice))


@every_operator
def test_what_changes_before_the_backward_of_a_step_is_refused_or_not_needed(operator: Any) -> None:
    def run(body: Any, *, call: Any = operator) -> Any:
        def step(x: Tensor, w: Tensor) -> Any:
            x, w = x.detach().requires_grad_(), w.clone()
            result = call(body, x, w)
            w.zero_()
            return torch.autograd.grad(result.sum(), x)

        return make_fx(step)(square().detach(), WEIGHT)(square().detach(), WEIGHT)

    def adds(x: Tensor, w: Tensor) -> Tensor:
        return (x + w).sin().cos()

    def overwrites(x: Tensor, w: Tensor) -> Tensor:
        return (x + w).exp().mul_(2).sin()

    assert_bitwise(run(adds), run(adds, call=lambda body, *args: body(*args)))
    for body in (_twice, overwrites):
        with pytest.raises(RuntimeError, match="inplace operation"):
            run(body, call=lambda body, *args: body(*args))
        with pytest.raises(RecomputeError, match="was mutated after it was saved"):
            run(body)


@every_operator
def test_a_tensor_that_is_given_twice_is_recomputed_from_once(operator: Any) -> None:
    def run(call: Any) -> Counter[str]:
        def step(x: Tensor) -> Any:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(call(x, x).sum(), x)

        return _counted(make_fx(step)(square().detach()))

    assert (run(partial(operator, _twice)) - run(_twice))["aten.sin"] == 1
