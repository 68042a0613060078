"""The torch.compile backend where tensors that cross between parts are written, or have hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from tests.helpers.selecting import slow_but
from tests.helpers.torch_versions import IS_OLD, TRACES_HOOKS
from tests.torch_compile.helpers import Recorder, compiled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partita import Program, plan
from partita.errors import TreatmentError
from partita.memory import Rates
from partita.policies import ByCapability, ByLabel, ByModule, BySize, SplitAt
from partita.torch_compile import backend
from partita.torch_compile.piece_borders import may_overlap
from partita.treatments import Call, KeepOperators, Lower, Recompute


class Model(nn.Module):
    """Two layers and a buffer, and one of the forwards below."""

    def __init__(self, forward: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def router(model: Model, x: Tensor) -> Tensor:
    values, _ = torch.topk(model.first(x).softmax(-1), 2)
    values /= values.sum(-1, keepdim=True)
    return values.sin()


def activation_in_place(model: Model, x: Tensor) -> Tensor:
    return functional.relu_(torch.tanh(model.first(x)) * 2).sin()


def detached_alias(model: Model, x: Tensor) -> Tensor:
    y = model.first(x)
    alias = y.detach()
    total = y.sum()
    alias.mul_(2)
    return y * 1 + total


def read_then_written(model: Model, x: Tensor) -> Tensor:
    y = model.first(x)
    kept = torch.relu(y + 1)
    y.mul_(3)
    return kept * y.sin()


def written_through_a_view(model: Model, x: Tensor) -> Tensor:
    y = model.first(x) * 2
    flat, kept = y.view(-1), torch.relu(y + 1)
    flat.mul_(3)
    return y.sin() + kept + flat.view(3, 4)


def written_without_gradients(model: Model, x: Tensor) -> Tensor:
    y = model.first(x) * 2
    with torch.no_grad():
        y.mul_(2)
    return y.sin() * y


def filled(model: Model, x: Tensor) -> Tensor:
    result = torch.zeros(3, 4)
    result[0] = model.first(x)[0]
    result[1] = x[1]
    return result.sin() + result


def written_again_and_again(model: Model, x: Tensor) -> Tensor:
    y = model.first(x) * 1
    for _ in range(3):
        y.add_(model.second(x))
        y = y.relu_() * 2
    return y


def read_with_an_offset(model: Model, x: Tensor) -> Tensor:
    y = model.first(x) * 2
    rest = y[1:]
    rest.mul_(y.sum())
    return rest.as_strided((2, 4), (4, 1), 4).sin() + rest


def buffer_before(model: Model, x: Tensor) -> Tensor:
    y = model.first(x) * (model.count + 1)
    model.count.add_(1)
    return y.sin()


def buffer_after(model: Model, x: Tensor) -> Tensor:
    model.count.add_(1)
    return (model.first(x) * (model.count + 1)).sin()


def hook_on_all_uses(model: Model, x: Tensor) -> Tensor:
    y = model.first(x)
    before = y.sin()
    y.register_hook(lambda gradient: gradient * gradient)
    return before + y.cos() * 2 + model.second(y)


def hook_on_a_view(model: Model, x: Tensor) -> Tensor:
    y = model.first(x)
    flat = y.view(-1)
    flat.register_hook(lambda gradient: gradient.abs())
    return y * 2 + flat.view(3, 4).sin()


def hook_on_the_result(model: Model, x: Tensor) -> Tensor:
    y = model.first(x).tanh()
    y.register_hook(lambda gradient: gradient * 5)
    return y


def hooks_in_order(model: Model, x: Tensor) -> Tensor:
    y = model.first(x)
    y.register_hook(lambda gradient: gradient + 1)
    z = y.exp()
    y.register_hook(lambda gradient: gradient * gradient)
    z.register_hook(lambda gradient: gradient * 2)
    return z + y


def hook_that_reads(model: Model, x: Tensor) -> Tensor:
    y, scale = model.first(x), model.second(x)
    y.register_hook(lambda gradient: gradient * scale)
    return y.sin() * scale


def hook_before_a_write(model: Model, x: Tensor) -> Tensor:
    y = model.first(x) * 1
    y.register_hook(lambda gradient: gradient * 3)
    y.mul_(2)
    z = y.sin()
    y.register_hook(lambda gradient: gradient * gradient)
    return z + y


WRITING = [
    router,
    activation_in_place,
    detached_alias,
    read_then_written,
    written_through_a_view,
    written_without_gradients,
    filled,
    written_again_and_again,
    read_with_an_offset,
    buffer_before,
    buffer_after,
]
HOOKING = [hook_on_all_uses, hook_on_a_view, hook_on_the_result]
if not IS_OLD:  # Dynamo of torch 2.11 applies a hook to later uses only, by backend="eager" too.
    HOOKING += [hooks_in_order, hook_that_reads, hook_before_a_write]


def mixed(region: Any) -> Any:
    return {"1": Recompute(), "2": Lower("aot_eager")}.get(region.name[-1], Call())


def trained(call: Callable[[Tensor], Tensor], model: Model) -> list[Tensor]:
    """What two steps give, with the gradients and the buffer."""
    found = []
    for step in range(2):
        torch.manual_seed(step)
        model.zero_grad()
        output = call(torch.randn(3, 4))
        output.square().sum().backward()
        gradients = (one.grad for one in model.parameters() if one.grad is not None)
        found += [output.detach(), *gradients, model.count]
        found = [value.clone() for value in found]
    return found


def assert_trained_alike(forward: Callable[..., Tensor], **options: Any) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Model(forward)
    twin = copy.deepcopy(model)
    found = trained(compiled(model, inner=options.pop("inner", "aot_eager"), **options), model)
    for one, other in zip(found, trained(twin, twin), strict=True):
        torch.testing.assert_close(one, other)


#: Regions that are only called are among the mixed ones.
_CALLED = (router, read_then_written, written_through_a_view, hook_on_all_uses)
_KINDS = [*WRITING, *HOOKING]


@pytest.mark.parametrize(
    ("forward", "parts", "treatment"),
    slow_but(
        product(_KINDS, (2, 3, 6), (Call(), mixed)),
        *product(_KINDS, (6,), (mixed,)),
        *product(_CALLED, (6,), (Call(),)),
    ),
)
def test_writes_and_hooks_mean_what_they_mean_in_eager_mode(
    forward: Callable[..., Tensor], parts: int, treatment: Any
) -> None:
    if forward is written_without_gradients and treatment is mixed and parts == 3:
        pytest.skip("Lower takes one mode a region, and this cut gives it two")
    assert_trained_alike(forward, policy=BySize(parts=parts), treatment=treatment)


@pytest.mark.parametrize("forward", HOOKING)
def test_lowered_regions_leave_hooks_their_gradients(forward: Callable[..., Tensor]) -> None:
    assert_trained_alike(forward, policy=ByCapability("aot_eager"), treatment=Lower("aot_eager"))


@pytest.mark.parametrize(
    "forward", slow_but([read_then_written, written_without_gradients, hook_on_all_uses], read_then_written)
)
def test_a_compiler_that_recomputes_finds_what_it_saved(forward: Callable[..., Tensor]) -> None:
    assert_trained_alike(forward, policy=BySize(parts=3), inner="inductor")


def test_a_part_that_shares_mutated_memory_says_that_it_is_not_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder()
    assert_trained_alike(detached_alias, policy=BySize(parts=2), inner=recorder)
    assert len(recorder.parts) == 1
    assert "mutates argument 0, which shares memory with another; it runs uncompiled" in caplog.text


def rows_of_a_view(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    y = x * 1
    pairs = y.view(2, 2, 4)
    pairs.transpose(0, 1)[0].mul_(2)
    before = y + 1
    pairs[:, 0].add_(1)
    return before + y, pairs[1]


def view_of_a_transpose(x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = x * 1
    y.t_()
    column = y.select(0, 1).expand(4, 4)
    return column, column * column + b.sin(), y * y + b.sin()


def transposed_after_a_border(x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = x * x + b
    other = b.sin() * x
    y.t_()
    other = other + y
    y.mul_(2)
    return y, other


def transposed_by_a_checkpoint(x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = checkpoint(lambda value: (value * 1).t_(), x, use_reentrant=False)
    column = y.select(0, 1).expand(4, 4)
    return column, column * column + b.sin(), y * y + b.sin()


@pytest.mark.parametrize("parts", slow_but([2, 3, 4, 6], 2))
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "function", [rows_of_a_view, view_of_a_transpose, transposed_after_a_border, transposed_by_a_checkpoint]
)
def test_views_that_cross_and_are_mutated_or_reshaped_are_those_of_eager_mode(
    function: Callable[..., tuple[Tensor, ...]], grad: bool, parts: int
) -> None:
    torch.manual_seed(0)
    values, b, found = torch.randn(4, 4), torch.randn(4, 4), []
    for call in (function, compiled(function, policy=BySize(parts=parts), inner="aot_eager")):
        x = values.clone().requires_grad_(grad)
        results = call(x, b)
        if grad:
            torch.stack([result.flatten() @ torch.arange(result.numel() + 0.0) for result in results]).sum().backward()
        found.append((x.grad, *results))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, check_stride=True)


class _Doubled(torch.autograd.Function):
    """Doubles in place; its gradient is not that of the doubling."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 5


def _doubled(x: Tensor) -> Tensor:
    result: Tensor = _Doubled.apply(x * 1)
    return result * 2


def _doubled_in_checkpoint(x: Tensor) -> Tensor:
    result: Tensor = checkpoint(_Doubled.apply, x * 1, use_reentrant=False)
    return result * 2


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def _beside_reversed(x: Tensor) -> Tensor:
    hidden = x * 1
    result: Tensor = _Reversed.apply(hidden)
    return hidden.sum() * 10 + result.sum()


@pytest.mark.parametrize("treatment", [Call(), Lower("aot_eager"), Lower("eager")])
@pytest.mark.parametrize("operators", [1, 2])
@pytest.mark.parametrize("function", [_doubled, _doubled_in_checkpoint, _beside_reversed])
def test_functions_that_alias_what_crosses_keep_their_own_backward(
    function: Callable[[Tensor], Tensor], operators: int, treatment: Any
) -> None:
    gradients = []
    for call in (
        function,
        compiled(function, policy=BySize(operators=operators), inner="aot_eager", treatment=treatment),
    ):
        x = torch.ones(3, requires_grad=True)
        call(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def _with_reversed(x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x * 1
    return hidden, _Reversed.apply(hidden)


@pytest.mark.parametrize("treatment", [Call(), Recompute()])
def test_a_function_whose_result_and_argument_a_model_returns_keeps_its_own_backward(treatment: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    hidden, result = compiled(_with_reversed, inner="aot_eager", treatment=treatment)(x)
    (hidden.sum() * 10 + result.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [9, 9, 9]


def test_a_peak_for_a_function_whose_backward_would_be_lost_is_refused() -> None:
    with pytest.raises(Exception, match="whose result shares memory with what crosses its border, and code that is"):
        compiled(_with_reversed, inner="aot_eager", peak="1GB")(torch.ones(3, requires_grad=True))


def test_a_function_that_returns_new_memory_is_compiled() -> None:
    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x**3

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return 7 * gradients[0]

    recorder = Recorder()
    call = compiled(lambda x: Cubed.apply(x * 2) + 1, policy=BySize(operators=1), inner=recorder)
    call(torch.ones(3, requires_grad=True))
    assert len(recorder.parts) == 3


@pytest.mark.parametrize(
    ("sizes", "strides", "offsets", "overlap"),
    [
        ((4, 2), (6, 1), (0, 2), False),  # The chunks of a row.
        ((4, 2), (6, 1), (0, 1), True),
        ((2, 3), (3, 1), (0, 6), False),  # The halves.
        ((2, 3), (3, 1), (0, 5), True),
        ((3,), (2,), (0, 1), False),  # Even and odd elements.
        ((3,), (2,), (0, 2), True),
        ((2, 2, 2), (8, 4, 1), (0, 2), False),
        ((3, 2), (0, 1), (0, 1), True),
        ((), (), (3, 3), True),
    ],
)
def test_views_overlap_where_they_have_elements_in_common(
    sizes: tuple[int, ...], strides: tuple[int, ...], offsets: tuple[int, int], overlap: bool
) -> None:
    memory = torch.zeros(30)
    one, other = (memory.as_strided(sizes, strides, offset) for offset in offsets)
    assert may_overlap(one, other) is may_overlap(other, one) is overlap
    assert not may_overlap(one, other.clone())


def test_parts_that_mutate_views_which_are_apart_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    def forward(x: Tensor) -> Tensor:
        first, second = (x * 1).chunk(2, dim=-1)
        total = first.sin() + second
        first.mul_(2)
        return total + second * first

    recorder, x = Recorder(), torch.randn(3, 4)
    call = compiled(forward, policy=BySize(parts=2), inner=recorder)
    torch.testing.assert_close(call(x), forward(x))
    assert len(recorder.parts) == 2
    assert "uncompiled" not in caplog.text


@TRACES_HOOKS
def test_a_part_that_has_a_share_in_a_hooks_gradients_says_that_it_is_not_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert_trained_alike(hook_on_all_uses, policy=BySize(parts=4))
    assert "contributes to the gradients that the hook 'register_hook' receives; it runs uncompiled" in caplog.text


@TRACES_HOOKS
def test_a_hook_inside_of_a_part_is_compiled_with_it() -> None:
    def forward(model: Model, x: Tensor) -> Tensor:
        y = model.first(x)
        y.register_hook(lambda gradient: gradient * gradient)
        return (y.sin() + y).cos()

    recorder = Recorder()
    policy = ByLabel(lambda node: "tail" if node.target == "cos" else "head")
    assert_trained_alike(forward, policy=policy, inner=recorder)
    assert len(recorder.parts) == 2


def test_parts_that_write_are_not_copied_for_where_nothing_is_trained() -> None:
    model, recorder = Model(read_then_written), Recorder()
    call = compiled(model, policy=BySize(parts=3), inner=recorder)
    with torch.no_grad():
        x = torch.randn(3, 4)
        torch.testing.assert_close(call(x), model(x))
    assert not any(node.target is torch.clone for part in recorder.parts for node in part.graph.nodes)


def test_statistics_of_a_batch_norm_are_mutated_by_its_part() -> None:
    model, recorder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), Recorder()
    twin, x = copy.deepcopy(model), torch.randn(3, 4)
    call = compiled(model, policy=BySize(operators=1), inner=recorder)
    for one in (call, twin):
        for _ in range(2):
            one(x).sum().backward()
    assert not any(node.target is torch.clone for part in recorder.parts for node in part.graph.nodes)
    for found, expected in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(found, expected)


def test_what_a_recomputed_region_keeps_is_kept_in_a_mixed_plan() -> None:
    def forward(model: Model, x: Tensor) -> Tensor:
        return model.second(torch.tanh(model.first(x)).sin()).cos()

    def treatment(region: Any) -> Any:
        return Recompute(KeepOperators(torch.tanh)) if region.name == "part_0" else Call()

    recorder = Recorder()
    assert_trained_alike(forward, policy=BySize(parts=2), treatment=treatment, inner=recorder)
    marks = {node.name: node.meta.get("recompute") for part in recorder.parts for node in part.graph.nodes}
    assert marks["tanh"] is torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


def test_a_mixed_plan_with_dropout_can_be_called_under_no_grad() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)), torch.randn(3, 4)
    call = compiled(model, policy=BySize(parts=2), treatment=lambda region: mixed(region), inner="aot_eager")
    with torch.no_grad():
        torch.manual_seed(1)
        found = call(x)
        torch.manual_seed(1)
        assert torch.equal(found, model(x))


@pytest.mark.parametrize("result", [torch.argmax, torch.detach], ids=["argmax", "detach"])
def test_dropout_is_recomputed_or_not_where_only_views_of_inputs_have_gradients(result: Any) -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return result(nn.functional.dropout(x)), x.t()

    x = torch.randn(3, 4, requires_grad=True)
    call = compiled(Views(), policy=BySize(parts=1), treatment=Recompute(), inner="aot_eager")
    torch.manual_seed(1)
    found, view = call(x)
    torch.manual_seed(1)
    assert torch.equal(found, Views()(x)[0])
    assert torch.equal(torch.autograd.grad(view.sum(), x)[0], torch.ones(3, 4))


@TRACES_HOOKS
def test_a_region_that_registers_a_hook_is_not_recomputed_by_a_second_run() -> None:
    def cut(graph_module: Any, inputs: Any) -> Any:
        with pytest.raises(TreatmentError, match="'register_hook' in region 'part_0' registers a hook"):
            plan(Program.of(graph_module), BySize(parts=1), Recompute()).apply()
        return graph_module.forward

    torch.compile(Model(hook_on_all_uses), backend=cut)(torch.randn(3, 4))


class _NormTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm(x + 10)


@pytest.mark.parametrize("policy", [BySize(parts=2), BySize(parts=1), ByModule("norm")])
def test_statistics_that_two_regions_update_are_those_of_eager(policy: Any) -> None:
    eager, model, x = _NormTwice(), _NormTwice(), torch.randn(4, 6)
    cut = torch.compile(model, backend=backend, options={"policy": policy, "inner": "aot_eager"})
    for _ in range(2):
        eager(x).sum().backward()
        cut(x).sum().backward()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


def _add_into(cache: Tensor, value: Tensor) -> None:
    cache.add_(value)


def test_a_custom_operator_whose_fake_kernel_writes_nothing_mutates_in_two_regions() -> None:
    library = torch.library.Library("partita_cut", "DEF")
    library.define("add_into(Tensor(a!) cache, Tensor value) -> ()")
    library.impl("add_into", _add_into, "CPU")
    library.impl("add_into", lambda cache, value: None, "Meta")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("cache", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            torch.ops.partita_cut.add_into(self.cache, self.linear(x).detach()[0])
            y = self.linear(x + 1)
            torch.ops.partita_cut.add_into(self.cache, y.detach()[0] * 10)
            return y + self.cache * 1

    model = Model()
    eager, x = copy.deepcopy(model), torch.ones(1, 2)
    cut = torch.compile(model, backend=backend, options={"policy": BySize(parts=2), "inner": "aot_eager"})
    torch.testing.assert_close(cut(x), eager(x))
    torch.testing.assert_close(model.cache, eager.cache)


class _Metric(nn.Module):
    """Mutates a value that relu saved, but no backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a = torch.relu(h)
        a.mul_(2)
        self.mean.lerp_(a.detach().mean(0), 0.1)
        return self.second(h)


@pytest.mark.parametrize("treatment", [Call(), Lower("aot_eager")])
@pytest.mark.parametrize("place", ["mul_", "detach"])
def test_a_saved_value_may_be_mutated_where_no_backward_needs_it(treatment: Any, place: str) -> None:
    model = _Metric()
    eager, x = copy.deepcopy(model), torch.randn(4, 6)
    options = {"policy": SplitAt(lambda node: place in node.name), "treatment": treatment, "inner": "aot_eager"}
    torch.compile(model, backend=backend, options=options)(x).sum().backward()
    eager(x).sum().backward()
    torch.testing.assert_close(model.first.weight.grad, eager.first.weight.grad)
    torch.testing.assert_close(model.mean, eager.mean)


class Counted(nn.Module):
    """Blocks that count their calls in double precision, and use nothing that the method returns."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.sin(torch.tanh(block(x)))
            self.calls.add_(1)
        self.mean.mul_(0.9).add_(x.detach().mean())
        return torch.square(x * self.calls.float()).mean()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": BySize(parts=3)},
        {"policy": BySize(parts=3), "treatment": Recompute()},
        {"policy": BySize(parts=2), "treatment": Lower("aot_eager")},
        {"peak": 1.0, "rates": Rates(matmul_flops=1e11, attention_flops=1e11, bytes=1e10, call=5e-6)},
    ],
)
def test_a_number_of_double_precision_is_mutated_where_nothing_uses_the_result(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    model = Counted()
    twin, call = copy.deepcopy(model), compiled(model, inner="aot_eager", **options)
    for _ in range(3):
        x = torch.randn(5, 4)
        found, expected = call(x), twin(x)
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
    for one, other in zip((*model.buffers(), *model.parameters()), (*twin.buffers(), *twin.parameters()), strict=True):
        torch.testing.assert_close(one, other)
    assert model.calls == 9


def test_a_number_of_double_precision_is_mutated_beside_a_float_that_changes() -> None:
    def function(x: Tensor, count: Tensor, scale: float) -> Tensor:
        count.add_(1)
        return torch.where(x > 0, x * scale, scale) * count

    torch.compiler.reset()
    call = compiled(function, dynamic=None)
    counts = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    for scale in (1.5, 2.5, 3.5):
        x = torch.randn(5)
        torch.testing.assert_close(call(x, counts[0], scale), function(x, counts[1], scale))
    assert counts[0] == 3
