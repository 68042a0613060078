"""Operators with a body under tracers: kept before dispatch, in the open after it, right in both."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from tests.hops.helpers import CASES, Case, Regions, assert_equal, gradients, seeded
from torch import nn
from torch._functorch.aot_autograd import aot_export_module, aot_function
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from partita import hops
from partita._torch.modes import read_ambient
from partita._torch.toggles import TOGGLES

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_mode = pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])


def _targets(module: GraphModule) -> list[Any]:
    """The functions that a graph and the bodies in it call."""
    graphs = [child.graph for child in module.modules() if isinstance(child, GraphModule)]
    return [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]


def _calls(module: GraphModule) -> list[str]:
    return [target.name() for target in _targets(module) if isinstance(target, torch._ops.HigherOrderOperator)]


@every_case
@every_mode
def test_a_trace_before_dispatch_keeps_the_call(case: Case, tracing_mode: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return case.call(lambda a, b: torch.mm(a, b) + 1, x, w) * 2

    x, w = torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)
    traced = make_fx(f, tracing_mode=tracing_mode, pre_dispatch=True)(x, w)
    assert _calls(traced) == [case.operator.name()]
    assert not TOGGLES & set(_targets(traced))
    found, expected = traced(x, w), f(x, w)
    assert torch.equal(found, expected)
    assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)


@every_case
@every_mode
def test_a_trace_after_dispatch_has_the_body_in_the_open(case: Case, tracing_mode: str) -> None:
    def f(run: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return run(lambda a, b: torch.mm(a, b) + 1, x, w) * 2

    x, w = torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)
    traced = make_fx(lambda *args: f(case.call, *args), tracing_mode=tracing_mode)(x, w)
    plain = make_fx(lambda *args: f(case.plainly, *args), tracing_mode=tracing_mode)(x, w)
    assert _calls(traced) == []
    assert [target for target in _targets(traced) if "detach" not in str(target)] == [
        target for target in _targets(plain) if "detach" not in str(target)
    ]
    assert torch.equal(traced(x, w), f(case.plainly, x, w))


@every_mode
def test_nested_calls_are_kept_nested(tracing_mode: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        def in_autocast(a: torch.Tensor) -> torch.Tensor:
            return hops.wrap_with_set_grad_enabled(True, lambda b: hops.call(torch.mm, b, b), a) + 1

        def in_inference(a: torch.Tensor) -> torch.Tensor:
            return hops.wrap_with_autocast("cpu", torch.bfloat16, True, None, in_autocast, a)

        return hops.wrap_with_inference_mode(True, in_inference, x) * 2

    x = torch.randn(3, 3, requires_grad=True)
    traced = make_fx(f, tracing_mode=tracing_mode, pre_dispatch=True)(x)
    assert _calls(traced) == [
        "partita_inference_mode",
        "partita_autocast",
        "partita_set_grad_enabled",
        "partita_call",
    ]
    assert not TOGGLES & set(_targets(traced))
    assert torch.equal(traced(x), f(x))
    assert not traced(x).requires_grad


@every_case
def test_any_container_passes_through_a_kept_call(case: Case) -> None:
    def body(pair: Any, *, named: Any) -> Any:
        return {"y": pair[0] * named["k"], "rest": [pair[1], None, 3, "text"], "more": (named["x"].sum(),)}

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return case.call(body, (x, 2.0), named={"k": 3, "x": y, "none": None})

    x, y = torch.ones(2), torch.ones(3)
    seen: list[Any] = []

    def kept(x: torch.Tensor, y: torch.Tensor) -> Any:
        seen.append(f(x, y))
        return seen[0]["y"], seen[0]["more"][0]

    traced = make_fx(kept, pre_dispatch=True)(x, y)
    assert seen[0]["rest"] == [2.0, None, 3, "text"]
    assert_equal(traced(x, y), (torch.full((2,), 3.0), torch.tensor(3.0)))


@pytest.mark.parametrize("result", ["nothing", "none", "tuple", "list", "operand"])
def test_bodies_may_give_anything(result: str) -> None:
    def body(x: torch.Tensor) -> Any:
        y = x + 1
        return {"nothing": None, "none": (None, y), "tuple": (y, y * 2), "list": [y], "operand": x}[result]

    def f(x: torch.Tensor) -> Any:
        given = hops.call(body, x)
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        return sum(tensors, x)

    x = torch.ones(2)
    traced = make_fx(f, pre_dispatch=True)(x)
    assert _calls(traced) == ["partita_call"]
    assert torch.equal(traced(x), f(x))


def test_a_body_without_operands_is_kept() -> None:
    traced = make_fx(lambda x: x + hops.call(lambda: torch.ones(2) * 2), pre_dispatch=True)(torch.zeros(2))
    assert _calls(traced) == ["partita_call"]
    assert torch.equal(traced(torch.zeros(2)), torch.full((2,), 2.0))


def test_symbolic_sizes_pass_as_operands_and_results() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        rows, zeros = hops.call(lambda a, n: (n + a.shape[1], a.new_zeros(n)), x, x.shape[0])
        return zeros.sum() + rows

    traced = make_fx(f, tracing_mode="symbolic", pre_dispatch=True)(torch.ones(3, 4))
    assert _calls(traced) == ["partita_call"]
    assert traced(torch.ones(5, 7)) == 12


def test_sizes_found_outside_become_operands() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows, double = x.shape[0], x.shape[0] * 2

        def body(a: torch.Tensor) -> torch.Tensor:
            return hops.wrap(lambda b: b.new_ones(rows, double), a).sum() + a.sum() + rows

        return hops.call(body, y)

    traced = make_fx(f, tracing_mode="symbolic", pre_dispatch=True)(torch.ones(3), torch.ones(7))
    (call,) = [node for node in traced.graph.nodes if node.target is hops.call]
    assert [node.op for node in call.args[1:]] == ["placeholder", "call_function"]
    assert traced(torch.ones(5), torch.ones(2)) == f(torch.ones(5), torch.ones(2)) == 57


def test_sizes_that_depend_on_data_are_bound_by_the_call() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return hops.call(torch.nonzero, x) + 1

    traced = make_fx(f, tracing_mode="symbolic", pre_dispatch=True)(torch.ones(3))
    (call,) = [node for node in traced.graph.nodes if node.target is hops.call]
    assert len(call.meta["unbacked_bindings"]) == 1
    assert traced(torch.tensor([0.0, 1.0, 1.0])).shape == (2, 1)


def test_tensors_found_outside_become_operands() -> None:
    module, outside = nn.Linear(2, 2), torch.ones(2)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return hops.wrap(lambda a: hops.call(module, a) + y + outside + torch.tensor(2.0), x)

    x = torch.randn(3, 2)
    traced = make_fx(f, pre_dispatch=True)(x)
    held = [name for name, _ in traced.partita_wrap_body_0.named_parameters()]
    assert held == []
    assert not [child for child in vars(traced.partita_wrap_body_0) if "constant" in child]
    assert torch.equal(traced(x), f(x))
    traced(x).sum().backward()
    assert module.weight.grad is not None


def test_tracing_runs_a_body_once() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x.add_(torch.rand(2))

    x = torch.zeros(2)
    torch.manual_seed(0)
    traced = make_fx(lambda a: hops.call(body, a) * 1, pre_dispatch=True)(x)
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(x, torch.rand(2))
    assert torch.equal(after, torch.rand(1))
    assert _calls(traced) == ["partita_call"]


@every_mode
def test_a_call_that_only_writes_stays_and_writes(tracing_mode: str) -> None:
    buffer = torch.zeros(2)

    def bump(tensor: torch.Tensor = buffer) -> None:
        tensor.add_(1.0)

    def f(x: torch.Tensor) -> torch.Tensor:
        hops.wrap_with_set_grad_enabled(False, bump, x)
        hops.wrap_with_set_grad_enabled(False, bump)
        return x * 2

    traced = make_fx(f, tracing_mode=tracing_mode, pre_dispatch=True, _allow_non_fake_inputs=True)(torch.zeros(2))
    buffer.zero_()
    traced.graph.eliminate_dead_code()
    traced.recompile()
    x = torch.zeros(2)
    assert torch.equal(traced(x), torch.full((2,), 2.0))
    assert torch.equal(x, torch.ones(2))
    assert torch.equal(buffer, torch.ones(2))


def test_tracing_a_kept_call_again_keeps_it() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return hops.wrap_with_autocast("cpu", torch.bfloat16, True, None, lambda a: hops.call(torch.mm, a, a), x)

    x = torch.randn(2, 2)
    once = make_fx(f, pre_dispatch=True)(x)
    twice = make_fx(once, pre_dispatch=True)(x)
    assert _calls(once) == _calls(twice) == ["partita_autocast", "partita_call"]
    assert len(once.graph.nodes) == len(twice.graph.nodes)
    assert torch.equal(twice(x), f(x))


def test_a_shared_body_is_traced_for_each_call() -> None:
    body = nn.Linear(2, 2)
    traced = make_fx(lambda x: hops.call(body, hops.call(body, x)), pre_dispatch=True)(torch.ones(1, 2))
    assert _calls(traced) == ["partita_call", "partita_call"]
    assert torch.equal(traced(torch.ones(1, 2)), body(body(torch.ones(1, 2))))


@every_case
@pytest.mark.parametrize("pre_dispatch", [True, False])
def test_modes_are_restored_when_tracing_fails(case: Case, pre_dispatch: bool) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        raise KeyError

    before = read_ambient()
    with pytest.raises(KeyError):
        make_fx(lambda x: case.call(body, x), pre_dispatch=pre_dispatch)(torch.ones(2))
    assert read_ambient() == before
    again = make_fx(lambda x: case.call(torch.sin, x), pre_dispatch=pre_dispatch)(torch.ones(2))
    assert torch.equal(again(torch.ones(2)), torch.ones(2).sin())


def test_metadata_of_a_body_reaches_a_trace_that_keeps_it() -> None:
    graph = torch.fx.Graph()
    y = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))
    y.meta["custom"] = {"region": 7}
    graph.output(y)
    body = GraphModule({}, graph)
    outer = torch.fx.Graph()
    x = outer.placeholder("x")
    outer.output(outer.call_function(hops.call, (outer.get_attr("body"), x)))
    program = GraphModule({"body": body}, outer)
    with torch.fx.traceback.preserve_node_meta():
        traced = make_fx(torch.fx.Interpreter(program).run)(torch.ones(2))
    (sin,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert sin.meta["custom"] == {"region": 7}


def test_the_autocast_cache_is_off_while_tracing() -> None:
    weight = nn.Parameter(torch.randn(2, 2))

    def body(x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_autocast_cache_enabled()
        return (x @ weight) @ weight

    x = torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            traced = make_fx(lambda a: hops.wrap_with_autocast("cpu", torch.bfloat16, True, True, body, a))(x)
    assert not [name for name, _ in traced.named_buffers()]
    assert len([name for name, _ in traced.named_parameters()]) == 1


# AOTAutograd --------------------------------------------------------------------------------------------------------


@every_case
def test_aot_training_step_has_the_gradients_of_the_plain_block(case: Case) -> None:
    x = torch.randn(3, 4)
    ours, theirs = seeded(lambda: Regions(case.call)), seeded(lambda: Regions(case.plainly))

    def compiled(x: torch.Tensor) -> torch.Tensor:
        parameters = dict(ours.named_parameters())

        def f(values: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(ours, dict(zip(parameters, values, strict=True)), (x,))

        return aot_function(f, lambda graph, _: graph)(list(parameters.values()), x)

    expected = gradients(theirs, x)
    x = x.detach().requires_grad_()
    compiled(x).sum().backward()
    found = [x.grad, *(parameter.grad for parameter in ours.parameters())]
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None or not mine.any()) == (other is None)
        assert other is None or torch.allclose(mine, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("exporting", [True, False])
def test_gradients_switched_on_inside_inference_mode_stay_off_in_a_trace(exporting: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return hops.wrap_with_inference_mode(True, hops.wrap_with_set_grad_enabled, True, torch.sin, x)

    x = torch.randn(2, requires_grad=True)
    assert not f(x).requires_grad
    assert not aot_function(f, lambda graph, _: graph)(x).requires_grad
    assert not make_fx(f, pre_dispatch=True)(x)(x).requires_grad
    if exporting:
        for strict in (True, False):
            program = torch.export.export(_Model(f), (x,), strict=strict)
            assert not program.module()(x).requires_grad


def test_inference_mode_switched_off_switches_gradients_on_in_a_trace() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return hops.wrap_with_set_grad_enabled(False, hops.wrap_with_inference_mode, False, torch.sin, x)

    x = torch.randn(2, requires_grad=True)
    assert f(x).requires_grad
    assert aot_function(f, lambda graph, _: graph)(x).requires_grad


def test_an_export_without_gradients_never_switches_them_on() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return x

    seen: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_exporting", lambda: True)
        with torch.no_grad():
            hops.wrap_with_set_grad_enabled(True, body, torch.ones(1))
        hops.wrap_with_set_grad_enabled(True, body, torch.ones(1))
        hops.wrap_with_inference_mode(True, lambda: body(torch.ones(1)).is_inference() and seen.append(None))
    assert seen == [False, True, False]


def test_a_kept_call_in_an_export_switches_gradients_on_inside_a_block_without_them() -> None:
    seen: list[bool] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.sin().requires_grad)
        return x.sin()

    def f(x: torch.Tensor) -> torch.Tensor:
        return hops.wrap_with_set_grad_enabled(False, hops.wrap_with_set_grad_enabled, True, body, x)

    x = torch.ones(2, requires_grad=True)
    program = torch.export.export(_Model(f), (x,), strict=False)
    assert seen == [True]
    assert program.module()(x).requires_grad


def test_functionalization_before_dispatch_has_the_body_in_the_open() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            hops.wrap_with_set_grad_enabled(False, lambda a: self.seen.add_(a), x)
            return (hops.call(lambda a: a.mul_(2), x.clone()) + self.seen,)

    x = torch.ones(2)
    traced, signature = aot_export_module(Model(), (x,), trace_joint=False, pre_dispatch=True)
    assert list(signature.buffers_to_mutate.values()) == ["seen"]
    assert torch._C._set_grad_enabled in _targets(traced)
    assert_equal(traced(torch.zeros(2), x), (torch.ones(2), torch.full((2,), 3.0)))


class _Model(nn.Module):
    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Any) -> Any:
        return self.f(*args)


def test_projections_of_a_kept_call_are_plain_items() -> None:
    traced = make_fx(lambda x: hops.call(lambda a: (a + 1, a + 2), x)[1], pre_dispatch=True)(torch.ones(1))
    items = [node.args[1] for node in traced.graph.nodes if node.target is operator.getitem]
    assert items in ([1], [0, 1])
