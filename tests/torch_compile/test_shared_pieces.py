"""Equal regions inside torch.compile are compiled once, and what only looks equal is not shared."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.torch_compile.helpers import Recorder, assert_trains_like_eager, compiled
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts

from partita import Partition, Program
from partita.policies import ByModule, Repeats, SplitAt
from partita.torch_compile import plans
from partita.treatments import Call, Recompute


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch.compiler.reset()


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(6))
        self.counts = False
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.scale != 1:
            x = x * self.scale
        if self.counts:
            self.seen.add_(x.detach().sum(0))
        return x + self.down(torch.tanh(self.up(x))) + self.dropout(x) + self.seen


class _Model(nn.Module):
    def __init__(self, change: Callable[[Any], object] | None = None, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Block() for _ in range(count))
        for layer in self.layers:
            nn.init.normal_(layer.norm.weight)  # Other weights than those of the layers beside it.
        self.head = nn.Linear(6, 3)
        if change is not None:
            change(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).softmax(-1)


def test_without_a_policy_each_distinct_body_is_compiled_once() -> None:
    recorder = Recorder()
    assert_trains_like_eager(_Model(), inner=recorder, share=True)
    assert len(recorder.parts) == 2  # A layer, and what follows.


def test_the_plan_counts_what_was_compiled() -> None:
    model = _Model(count=6)
    compiled(model, inner="aot_eager")(torch.randn(4, 6))
    (frame,) = plans(model)
    assert len(frame.plan.partition) == 7
    assert frame.bodies == 2


def test_a_model_without_repeats_is_one_region() -> None:
    recorder = Recorder()
    assert_trains_like_eager(_Model(count=1), inner=recorder)
    assert len(recorder.parts) == 1


def test_a_function_gets_every_region_unless_it_is_asked_to_share() -> None:
    recorder = Recorder()
    assert_trains_like_eager(_Model(), inner=recorder)
    assert len(recorder.parts) == 5


def test_one_function_serves_all_layers_at_all_sizes() -> None:
    model = _Model()
    assert_trains_like_eager(model, sizes=(3, 4, 5), dynamic=True, inner="aot_eager")
    assert plans(model)[-1].bodies == 2


def test_layers_that_mutate_their_own_buffers_share() -> None:
    def all_count(layers: Any) -> None:
        for layer in layers:
            layer.counts = True

    recorder = Recorder()
    assert_trains_like_eager(_Model(all_count), inner=recorder, share=True)
    assert len(recorder.parts) == 3  # The input of the first layer requires no gradient.


def test_modes_of_the_caller_are_those_of_each_call() -> None:
    model, x = _Model().eval(), torch.randn(4, 6)
    call = compiled(model, inner="aot_eager")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(call(x), model(x))
        with torch.no_grad():
            assert torch.equal(call(x), model(x))
        assert torch.equal(call(x), model(x))


def test_recomputed_layers_are_regions_by_default() -> None:
    model = _Model()
    assert_trains_like_eager(model, inner="aot_eager", treatment=Recompute())
    (frame,) = plans(model)
    assert [region.label for region in frame.plan.partition] == ["repeat_0"] * 4 + ["part_0"]


def _tie(layers: Any) -> None:
    layers[2].up.weight = layers[1].up.weight


def _alias_inside(layers: Any) -> None:
    layers[1].norm.bias = layers[1].norm.weight


def _other_strides(layers: Any) -> None:
    layers[1].up.weight = nn.Parameter(layers[1].up.weight.detach().T.contiguous().T)


def _count_one(layers: Any) -> None:
    layers[2].counts = True


def _evaluate_one(layers: Any) -> None:
    layers[1].dropout.eval()


def _freeze_one(layers: Any) -> None:
    layers[1].requires_grad_(False)


def _scale_one(layers: Any) -> None:
    layers[2].scale = -0.0


def _drop_more(layers: Any) -> None:
    layers[2].dropout.p = 0.25


def _hook_one(layers: Any) -> None:
    layers[1].register_forward_hook(lambda module, args, output: output * 2)


def _other_epsilon(layers: Any) -> None:
    layers[1].norm.eps = 1e-3


def _other_dtype(layers: Any) -> None:
    layers[1].seen = layers[1].seen.to(torch.float64).float().half()


_CHANGES: list[Callable[[Any], object]] = [
    _tie,
    _alias_inside,
    _other_strides,
    _count_one,
    _evaluate_one,
    _freeze_one,
    _scale_one,
    _drop_more,
    _hook_one,
    _other_epsilon,
    _other_dtype,
]
_BY_MODULE = ByModule("layers.*")


@pytest.mark.parametrize(
    ("change", "policy"),
    slow_but(product(_CHANGES, (None, _BY_MODULE)), *product(_CHANGES, (None,)), (_tie, _BY_MODULE)),
)
def test_layers_that_only_look_equal_are_not_shared(change: Callable[[Any], object], policy: Any) -> None:
    options = {} if policy is None else {"policy": policy}
    # The gradients of a weight with several uses are summed region by region.
    assert_trains_like_eager(_Model(change), inner="aot_eager", exact=change is not _tie, **options)


@pytest.mark.slow
def test_inductor_compiles_a_layer_once_and_trains_alike() -> None:
    recorder = Recorder("inductor")
    model = _Model()
    for layer in model.layers:
        layer.dropout.p = 0.0
    assert_trains_like_eager(model, inner=recorder, share=True, exact=False)
    assert len(recorder.parts) == 2


class _Scaled(nn.Module):
    """Layers that differ in a factor, a float or a buffer."""

    def __init__(self, make: Callable[[float], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(4))
        for at, layer in enumerate(self.layers):
            factor = make(0.5 + at / 8)
            if isinstance(factor, Tensor):
                layer.register_buffer("factor", factor)
            else:
                layer.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * layer.factor
        return x


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("make", "bodies"), [(float, 4), (torch.tensor, 1)])
def test_factors_that_differ_are_inputs_if_they_are_buffers(
    make: Callable[[float], Any], bodies: int, *, dynamic: bool
) -> None:
    model, x = _Scaled(make).eval(), torch.randn(4, 6)
    with torch.no_grad():
        options = {"inner": "aot_eager", "policy": SplitAt(_is_norm)}
        torch.testing.assert_close(compiled(model, dynamic=dynamic, **options)(x), model(x))
    # With `dynamic`, Dynamo makes an input of a float, too.
    assert plans(model)[-1].bodies == (1 if dynamic else bodies)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("treatment", [Call(), Recompute()], ids=str)
def test_by_default_layers_with_factors_of_their_own_are_compiled_once(treatment: Any, *, dynamic: bool) -> None:
    model, sizes = _Scaled(float), (4, 5, 6) if dynamic else (4, 4, 4)
    assert_trains_like_eager(model, sizes=sizes, dynamic=dynamic, inner="aot_eager", treatment=treatment)
    (frame,) = plans(model)
    # With `dynamic`, Dynamo makes inputs of the floats.
    assert len(frame.plan.partition.constants) == (0 if dynamic else 4)
    assert frame.bodies == 1


@pytest.mark.slow
def test_inductor_computes_with_a_factor_that_is_passed_as_with_a_constant() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model, x = _Scaled(float).eval().to(dtype), torch.randn(4, 6, dtype=dtype)
        with torch.no_grad():
            results = [compiled(model, policy=policy)(x) for policy in (Repeats(min_size=6), _repeats_apart)]
        assert torch.equal(*results)
        torch.testing.assert_close(results[0], model(x))


def _repeats_apart(program: Program) -> Partition:
    """The same regions, with the numbers in their bodies."""
    return Partition(program, Repeats(min_size=6)(program).regions)


def test_without_gradients_modes_leak_nothing_into_the_numbers() -> None:
    """A graph that is compiled in inference mode holds tensors that autograd can use."""
    model, x = _Scaled(float).eval(), torch.randn(4, 6)
    call = compiled(model, inner="aot_eager")
    with torch.inference_mode():
        torch.testing.assert_close(call(x), model(x))
    torch.testing.assert_close(call(x), model(x))


def _is_norm(node: Node) -> bool:
    return node.target is nn.functional.layer_norm


def test_the_inner_backend_is_counted_in_lines_about_progress(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "partita.plans.progress"):
        compiled(_Model(count=6).eval(), inner="aot_eager")(torch.randn(4, 6))
    told = [record.getMessage() for record in caplog.records if record.name == "partita.plans.progress"]
    assert [line.split(",")[0] for line in told] == ["1 of 2 bodies", "2 of 2 bodies"]


def _fake_runs(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> int:
    """How many pieces run on fake tensors in a call that compiles."""
    ran = []
    run = Interpreter.run

    def note(self: Interpreter, *args: Any, **kwargs: Any) -> Any:
        ran.append(type(self))
        return run(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Interpreter, "run", note)
        call()
    return ran.count(PropagateUnbackedSymInts)


@pytest.mark.parametrize("dynamic", [False, True])
def test_equal_layers_without_side_effects_run_on_fake_tensors_once(
    monkeypatch: pytest.MonkeyPatch, *, dynamic: bool
) -> None:
    model, x = _Model(count=6).eval(), torch.randn(4, 6)
    function = compiled(model, inner="eager", dynamic=dynamic)
    with torch.no_grad():
        assert _fake_runs(monkeypatch, lambda: function(x)) == 2  # A layer, and what follows.
        torch.testing.assert_close(function(x), model(x))
        torch.testing.assert_close(function(x[:3]), model(x[:3]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_with_gradients_run_on_fake_tensors_once(monkeypatch: pytest.MonkeyPatch, *, dynamic: bool) -> None:
    model, x = _Model(count=6), torch.randn(4, 6)
    function = compiled(model, inner="eager", dynamic=dynamic)
    # The first layer, whose input requires no gradient, another one, and what follows.
    assert _fake_runs(monkeypatch, lambda: function(x)) == 3
    torch.compiler.reset()
    assert_trains_like_eager(model, inner="aot_eager")


class _Apart(nn.Module):
    """Layers beside each other; each result is changed in place after its layer has run."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(3))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for layer in self.layers:
            result = layer(x)
            self.change(result)
            results.append(result)
        return torch.cat(results)


@pytest.mark.parametrize("change", [lambda y: y.unsqueeze_(0), lambda y: y.t_()])
def test_a_result_that_is_changed_in_place_says_nothing_of_the_next(change: Callable[[Tensor], object]) -> None:
    model, x = _Apart(change).eval(), torch.randn(4, 6)
    with torch.no_grad():
        found = compiled(model, inner="aot_eager", policy=ByModule("layers.*"))(x)
        torch.testing.assert_close(found, model(x))


class _Chosen(nn.Module):
    """Two results, each with gradients for other inputs; of the last layer one is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for one, other in self.layers:
            x, y = torch.tanh(one(x).sin()) + x, torch.sigmoid(other(y).cos()) * y
        return x


def test_unused_results_of_equal_layers_have_no_gradients() -> None:
    model, x = _Chosen(), torch.randn(4, 6)
    compiled(model, inner="aot_eager", policy=Repeats(min_size=6))(x).sum().backward()
    assert [(one.weight.grad is None, other.weight.grad is None) for one, other in model.layers] == [(False, True)] * 4


class _Differentiates(nn.Module):
    """Takes a gradient inside of its graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return gradient


def test_a_backward_inside_of_the_graph_passes_through_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Differentiates().eval()
    x = torch.randn(4, 6, requires_grad=True)
    monkeypatch.setattr(torch._dynamo.config, "trace_autograd_ops", True)
    torch.testing.assert_close(compiled(model, inner="aot_eager")(x), model(x))
