"""Lowered regions among modes, tracers and transforms: compiled for what is in force, or run as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compat.split_helpers import Draft
from tests.helpers.core import program_of
from tests.lowering.helpers import Counting, lowered, plan_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from partita import Program, capture, plan, verify
from partita.policies import ByCapability, ByMode, BySize
from partita.treatments import Lower


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def test_grad_inference_and_autocast_are_part_of_the_signature() -> None:
    backend = Counting()
    original = model()
    module = lowered(original, Lower(backend))
    x = torch.randn(2, 4)
    settings: list[Callable[[], Any]] = [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
    ]
    for _ in range(2):
        for setting in settings:
            with setting():
                one, other = module(x), original(x)
            assert torch.equal(one, other)
            assert (one.dtype, one.requires_grad, one.is_inference()) == (
                other.dtype,
                other.requires_grad,
                other.is_inference(),
            )
    assert len(backend.made) == 5


@pytest.mark.parametrize(
    ("enter", "leave"),
    [
        (lambda d: d.grad(False), lambda d, handle: d.grad(True)),
        (lambda d: d.enter_autocast(torch.bfloat16), lambda d, handle: d.exit_autocast(handle)),
        (lambda d: d.enter_inference(), lambda d, handle: d.exit_inference(handle)),
    ],
    ids=["no_grad", "autocast", "inference"],
)
def test_the_mode_of_a_body_holds_inside(enter, leave) -> None:
    draft = Draft(weight=nn.Parameter(torch.randn(4, 4)))
    x = draft.input("x")
    handle = enter(draft)
    inside = draft.call(torch.matmul, x, draft.attr("weight"))
    leave(draft, handle)
    program = Program.of(draft.done((inside, draft.call(torch.sin, x))))
    backend = Counting()
    decided = plan(program, ByMode(), Lower(backend, strict=True))
    assert len(decided.partition) == 1
    verify(program, decided.apply(), (torch.randn(2, 4, requires_grad=True),))
    assert backend.made


def test_a_mode_is_put_back_when_the_body_raises() -> None:
    draft = Draft()
    x = draft.input("x")
    draft.grad(False)
    inside = draft.call(torch.reshape, x, (3, -1))
    draft.grad(True)
    module = plan(Program.of(draft.done(inside)), ByMode(), Lower("aot_eager")).apply().module()
    with pytest.raises(RuntimeError, match="invalid for input"):
        module(torch.randn(4))
    assert torch.is_grad_enabled()


def test_a_body_that_switches_gradients_on_inside_runs_as_it_is() -> None:
    @torch.no_grad()
    def outer(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x * 2
        return y

    program = capture(outer, (torch.randn(3, requires_grad=True),))
    after = plan(program, ByMode(), Lower("aot_eager")).apply()
    verify(program, after, (torch.randn(3, requires_grad=True),))


def test_a_module_that_leaves_gradients_on_does_so_where_it_is_lowered() -> None:
    body = Graph()
    result = body.call_function(torch.sin, (body.placeholder("x"),))
    body.call_function(torch._C._set_grad_enabled, (True,))
    body.output(result)
    outer = Graph()
    outer.output(outer.call_module("inner", (outer.placeholder("x"),)))
    inner = GraphModule({}, body)
    program = Program.of(GraphModule({"inner": inner}, outer))
    decided = plan_of(program, Lower("aot_eager"))
    verify(program, decided.apply(), (torch.randn(3, requires_grad=True),))
    assert [failure.reason for failure in decided.failures] == [
        "a module in it leaves gradients switched, which compiled code would not do"
    ]


class Noting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        SEEN.append(str(func))
        return func(*args, **(kwargs or {}))


class NotingFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        SEEN.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


SEEN: list[str] = []


@pytest.mark.parametrize(("mode", "name"), [(Noting, "aten.tanh.default"), (NotingFunctions, "tanh")])
def test_a_mode_that_watches_sees_every_operator(mode: type[Any], name: str) -> None:
    backend = Counting()
    module = lowered(model(), Lower(backend))
    x = torch.randn(2, 4)
    for _ in range(2):
        SEEN.clear()
        with mode():
            module(x)
        assert name in SEEN
        module(x)
    assert len(backend.made) == 1


def test_a_default_device_or_dtype_is_part_of_the_signature() -> None:
    backend = Counting()
    fresh = lowered(FreshlyMade(), Lower(backend))
    assert fresh(torch.zeros(3)).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert fresh(torch.zeros(3)).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(backend.made) == 2
    with torch.device("meta"):
        assert fresh(torch.zeros(3, device="cpu")).device.type == "meta"
    assert fresh(torch.zeros(3)).device.type == "cpu"


class FreshlyMade(nn.Module):
    """Gives a tensor of whatever kind is made by default."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(0.0, x.size(0))


def test_transforms_go_through_the_body() -> None:
    original = model()
    module = lowered(original, Lower("aot_eager"))
    x = torch.randn(5, 4)
    module(x)
    assert torch.allclose(torch.vmap(module)(x), torch.vmap(original)(x))
    one, other = (torch.func.grad(lambda x, m=m: m(x).sum())(x) for m in (module, original))
    assert torch.allclose(one, other)
    one, other = (torch.func.jvp(m, (x,), (x,))[1] for m in (module, original))
    assert torch.allclose(one, other)


def test_fake_tensors_go_through_the_body() -> None:
    backend = Counting()
    module = lowered(lambda x: (x @ x).tanh(), Lower(backend))
    with FakeTensorMode():
        assert module(torch.randn(4, 4)).shape == (4, 4)
    assert backend.made == []


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_traces_the_body(pre_dispatch: bool) -> None:
    module = lowered(lambda x: (x * 2).tanh(), Lower("aot_eager"))
    x = torch.randn(3)
    module(x)
    traced = make_fx(module, pre_dispatch=pre_dispatch)(x)
    assert {str(node.target) for node in traced.graph.nodes} >= {"aten.mul.Tensor", "aten.tanh.default"}
    assert torch.equal(traced(x), module(x))


def test_export_traces_the_body() -> None:
    module = lowered(model(), Lower("aot_eager"))
    x = torch.randn(3, 4)
    expected = module(x)
    exported = torch.export.export(module, (x,))
    assert any("linear" in str(node.target) for node in exported.graph.nodes)
    assert torch.allclose(exported.module()(x), expected)


@pytest.mark.parametrize("fresh", [True, False], ids=["before its first call", "after it"])
def test_the_result_can_be_compiled_by_torch(fresh: bool) -> None:
    original = model()
    module = lowered(original, Lower("aot_eager"))
    x = torch.randn(3, 4)
    if not fresh:
        module(x)
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, backend=keep, fullgraph=True)
    assert torch.equal(compiled(x), original(x))
    assert len(graphs) == 1


def test_an_exported_program_in_modes_can_be_compiled_by_torch() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.linear(x)
            return y * x

    original = Frozen()
    program = capture(original, (torch.randn(3, 4),))
    module = plan(program, ByMode(), Lower("aot_eager")).apply().module()
    torch._dynamo.reset()
    x = torch.randn(3, 4, requires_grad=True)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), original(x))
    one, other = (torch.autograd.grad(m(x).sum(), x)[0] for m in (compiled, original))
    assert torch.equal(one, other)


def test_tensors_of_other_classes_go_through_the_body() -> None:
    class Mine(Tensor):
        pass

    backend = Counting()
    decided = plan_of(lambda x: x * 2, Lower(backend))
    module = decided.apply().module()
    assert type(module(torch.ones(3).as_subclass(Mine))) is Mine
    assert torch.equal(module(torch.eye(3).to_sparse()).to_dense(), torch.eye(3) * 2)
    assert torch.equal(module(torch.ones(2, dtype=torch.complex64).conj()), torch.full((2,), 2 + 0j))
    assert backend.made == []


def test_what_cannot_be_an_input_is_said_to_be_the_reason() -> None:
    decided = plan_of(lambda x, g: torch.rand(3, generator=g) * x, Lower("aot_eager"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decided.apply().module()(torch.ones(3), torch.Generator())
    assert [failure for failure in decided.failures if "Generator" in failure.reason or "generator" in failure.reason]


def test_tensors_of_inference_mode_may_come_out_of_it() -> None:
    original = model()
    module = lowered(original, Lower("aot_eager"))
    with torch.inference_mode():
        x = torch.randn(3, 4)
        module(x)
    with torch.no_grad():
        assert torch.equal(module(x), original(x))
    for call in (module, original):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            call(x)


def test_hooks_on_saved_tensors_see_real_tensors() -> None:
    module = lowered(lambda x: x.sin().exp(), Lower("aot_eager"))
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x).sum().backward()
    assert packed
    assert all(type(tensor) in (Tensor, nn.Parameter) for tensor in packed)
    assert torch.allclose(x.grad, x.detach().sin().exp() * x.detach().cos())


def test_a_region_may_be_recomputed() -> None:
    original = program_of(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())).module()
    module = lowered(Program.of(original), Lower("aot_eager"))
    x = torch.randn(3, 4, requires_grad=True)
    found = []
    for m in (original, module):
        torch.manual_seed(2)
        torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False).sum().backward()
        found.append(x.grad)
        x.grad = None
    assert torch.equal(*found)


def test_kernels_that_torch_picks_for_weights_with_gradients_are_the_same_under_no_grad() -> None:
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)
    program = capture(layer, (x,))
    result = plan(program, ByCapability("aot_eager"), Lower("aot_eager")).apply()
    with torch.no_grad():
        verify(program, result, (x,))


def test_a_region_that_enters_a_transform_and_does_not_leave_it_leaves_no_level_open_where_it_is_compiled() -> None:
    def tangent(x: Tensor) -> Tensor:
        value, tangent = torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))
        return value * tangent

    x = torch.arange(3.0)
    options = {"policy": BySize(parts=2), "treatment": Lower("eager")}
    found = torch.compile(tangent, backend="partita", options=options)(x)
    assert torch.equal(found, tangent(x))
