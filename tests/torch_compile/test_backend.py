"""The torch.compile backend: a model cut inside torch.compile computes, trains and writes as it does in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.torch_compile.helpers import Recorder, assert_trains_like_eager, compiled
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from partita import Partition, Program, Region
from partita._torch.fx.lazy_graph_module import LazyModule
from partita.analysis.tolerance import EXACT, Tolerance
from partita.errors import CycleError, OptionError
from partita.policies import AroundOperators, ByCapability, ByLabel, ByModule, BySize, SplitAt
from partita.testing.captured import Attention, Buffered, Casting, Frozen, Mixer
from partita.torch_compile import backend, input_kinds
from partita.treatments import Call, LeaveEager, Lower, Recompute

EVERY_NODE = BySize(operators=1)
EVERY_THREE = BySize(operators=3)


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("policy", "inner"),
    slow_but(
        product((EVERY_NODE, EVERY_THREE), ("eager", "aot_eager")), (EVERY_NODE, "aot_eager"), (EVERY_THREE, "eager")
    ),
)
@pytest.mark.parametrize("model", [Attention, Buffered, Casting, Frozen, Mixer])
def test_training_is_that_of_eager_mode_to_the_bit(model: type[nn.Module], policy: Any, inner: str) -> None:
    assert_trains_like_eager(model(), policy=policy, inner=inner)


@pytest.mark.parametrize("model", [Attention, Casting, Mixer])
def test_sizes_may_change_without_a_new_graph(model: type[nn.Module]) -> None:
    recorder = Recorder()
    assert_trains_like_eager(model(), sizes=(4, 7, 5), policy=EVERY_THREE, inner=recorder, dynamic=True)
    names = [part.meta["dynamo_compile_id"] for part in recorder.parts]
    assert len(set(map(str, names))) == 1
    assert any(isinstance(value, torch.SymInt) for inputs in recorder.inputs for value in inputs)


def test_parts_trained_by_inductor_agree_with_eager_mode() -> None:
    recorder = Recorder("inductor")
    assert_trains_like_eager(Frozen(), policy=BySize(parts=2), inner=recorder, exact=False)
    assert len(recorder.parts) == 2
    assert all(_waits_for_code(part) for part in recorder.parts)


def test_parts_that_go_to_a_compiler_generate_no_code() -> None:
    recorder = Recorder()
    assert_trains_like_eager(Mixer(), policy=EVERY_THREE, inner=recorder)
    assert len(recorder.parts) > 1
    assert all(_waits_for_code(part) for part in recorder.parts)


def _waits_for_code(part: GraphModule) -> bool:
    return isinstance(part, LazyModule) and bool(part._needs_recompile())


def test_without_a_policy_all_is_one_part() -> None:
    recorder = Recorder()
    assert_trains_like_eager(Casting(), inner=recorder)
    assert len(recorder.parts) == 1


def _stage(node: Any) -> str:
    return "tail" if node.target in ("sin", torch.sin) else "head"


def test_policies_of_every_kind_cut_the_graph() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu()).sin()

    policies = {
        "label": (ByLabel(_stage), 2),
        "sequential": (SplitAt(lambda node: node.target == "relu"), 2),
        "around": (AroundOperators(torch._C._nn.linear), 4),
        "size": (BySize(parts=3), 3),
    }
    for policy, count in policies.values():
        torch.compiler.reset()
        recorder = Recorder()
        assert_trains_like_eager(Model(), policy=policy, inner=recorder)
        assert len(recorder.parts) == count


def test_nodes_outside_every_region_run_eagerly() -> None:
    recorder = Recorder()
    only_linear = ByLabel(lambda node: "linear" if node.target is torch._C._nn.linear else None)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.sin()).cos()

    assert_trains_like_eager(Model(), policy=only_linear, inner=recorder)
    assert [node.op for node in recorder.parts[0].graph.nodes].count("call_function") == 1


def test_example_inputs_are_as_the_part_will_find_them() -> None:
    """The tensor requires a gradient only after the write inside the first part."""

    def write(weight: Tensor) -> Tensor:
        hidden = torch.zeros(4)
        hidden.add_(weight)
        return hidden.sin()

    recorder = Recorder()
    weight = torch.randn(4, requires_grad=True)
    result = compiled(write, policy=EVERY_NODE, inner=recorder)(weight)
    assert recorder.wants_gradients == [[], [False, True], [True]]
    result.sum().backward()
    assert torch.equal(result, weight.sin())
    assert torch.equal(weight.grad, weight.detach().cos())


def test_outputs_alias_as_in_eager_mode() -> None:
    def alias(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        product = x * weight
        view = product.view(2, 2)
        view.mul_(2)
        return product, view.t(), x, x.view(2, 2)

    x, weight = torch.randn(4), torch.randn(4, requires_grad=True)
    found, expected = compiled(alias, policy=EVERY_NODE, inner="aot_eager")(x, weight), alias(x, weight)
    assert _sharing((*found, x)) == _sharing((*expected, x))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("policy", "treatment"),
    [
        (BySize(parts=1), Call()),
        (EVERY_NODE, Call()),
        (BySize(parts=1), Recompute()),
        (ByCapability("aot_eager"), Lower("aot_eager")),
    ],
    ids=str,
)
def test_no_gradient_flows_through_a_view_made_under_no_grad(policy: Any, treatment: Any) -> None:
    """torch.compile (2.13) lets it through, also with the backend aot_eager."""

    def look(x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            frozen = x.view(-1)
        return x * 2, frozen, frozen[1:]

    x = torch.ones(2, 2, requires_grad=True)
    results = compiled(look, policy=policy, treatment=treatment, inner="aot_eager")(x)
    sum(result.sum() for result in results).backward()
    assert torch.equal(x.grad, torch.full((2, 2), 2.0))
    assert all(result.requires_grad for result in results)


def detached_later(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x * 2, y.sum().detach()


def items_of_one(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first, second = (x * y).chunk(2)
    return first.sin(), second.cos(), (y * 2).sum().detach()


def given_again(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = x.sin()
    return h.contiguous(), y.exp(), h * y


@pytest.mark.parametrize("policy", [EVERY_NODE, BySize(operators=2), EVERY_THREE], ids=["one", "two", "three"])
@pytest.mark.parametrize("function", [detached_later, items_of_one, given_again])
def test_inputs_that_no_used_result_depends_on_get_no_gradient(function: Callable[..., Any], policy: Any) -> None:
    """One compiled backward gives zeros to all inputs of its part."""

    def gradients(call: Callable[..., Any], place: int) -> list[Any]:
        x, y = torch.ones(2, 2, requires_grad=True), torch.full((2, 2), 2.0, requires_grad=True)
        result = call(x, y)[place]
        found = torch.autograd.grad(result.sum(), (x, y), allow_unused=True) if result.requires_grad else ()
        return [None if gradient is None else gradient.tolist() for gradient in found]

    cut = compiled(function, policy=policy, inner="aot_eager")
    for place in range(len(function(torch.ones(2, 2), torch.ones(2, 2)))):
        assert gradients(cut, place) == gradients(function, place)


def test_a_tensor_that_crosses_twice_may_be_mutated() -> None:
    def twice(x: Tensor) -> Tensor:
        first = x * 2
        same = first.add_(1)
        again = first.mul_(2)
        return first + same + again

    for dynamic in (False, True):
        x = torch.randn(4)
        assert torch.equal(compiled(twice, policy=BySize(operators=2), inner="aot_eager", dynamic=dynamic)(x), twice(x))


def test_an_input_that_inductor_returns_as_output_is_not_mutated() -> None:
    """Inductor gives back `x` itself for `zeros + x`; a later part then writes to it."""

    def accumulate(x: Tensor) -> Tensor:
        total = torch.zeros(4) + x
        return total.mul_(2)

    x = torch.randn(4)
    before = x.clone()
    cut_before_write = SplitAt(lambda node: node.target == "mul_")
    with torch.no_grad():
        result = compiled(accumulate, policy=cut_before_write, inner="inductor")(x)
    assert torch.equal(x, before)
    assert torch.equal(result, before * 2)


def test_inference_blocks_may_write() -> None:
    def infer(x: Tensor) -> Tensor:
        with torch.inference_mode():
            hidden = x.sin()
            hidden.add_(1)
        return hidden + x

    x = torch.randn(4)
    assert torch.equal(compiled(infer, policy=EVERY_NODE, inner="aot_eager")(x), infer(x))


def test_sizes_that_depend_on_data_cross_between_parts() -> None:
    def select(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        places = (x > 0).nonzero()
        return (places.float() * 2).sum(0) * weight.sum(), places

    weight = torch.randn(4, requires_grad=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = compiled(select, policy=BySize(operators=2), inner="aot_eager")
        for x in (torch.tensor([1.0, -1.0, 1.0]), torch.tensor([1.0, -1.0, -1.0])):
            assert all(map(torch.equal, call(x, weight), select(x, weight)))


def test_modes_are_left_as_they_were_found() -> None:
    model = Casting()
    with torch.autocast("cpu", torch.bfloat16):
        compiled(model, policy=EVERY_THREE, inner="aot_eager")(torch.randn(4, 6))
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@dataclass(frozen=True)
class Doubled:
    """A treatment that runs something else than the graph, so that no compiler gets it."""

    tolerance: ClassVar[Tolerance] = EXACT
    allows_mixed_modes: ClassVar[bool] = True

    def treat(self, body: GraphModule) -> nn.Module:
        return _Twice(body)

    def marks(self, region: Region) -> dict[str, object]:
        return {}


class _Twice(nn.Module):
    def __init__(self, body: GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any) -> tuple[Any, ...]:
        return tuple(2 * output for output in self.body(*args))


def test_the_treatment_decides_what_runs() -> None:
    def pair(x: Tensor) -> Tensor:
        return x.sin().cos()

    recorder, x = Recorder(), torch.randn(4)
    treatment = {"part_sin": Doubled(), "part_cos": Call()}
    by_name = ByLabel(lambda node: f"part_{node.target}")
    result = compiled(pair, policy=by_name, treatment=treatment, inner=recorder)(x)
    assert torch.equal(result, (2 * x.sin()).cos())
    assert len(recorder.parts) == 1


def test_a_function_may_be_the_inner_backend() -> None:
    seen: list[int] = []

    def inner(part: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(len(example_inputs))
        return part

    x = torch.randn(4)
    assert torch.equal(compiled(lambda x: x.sin() + x, policy=EVERY_NODE, inner=inner)(x), x.sin() + x)
    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"polcy": EVERY_NODE}, "no option 'polcy'; its options are 'policy', 'treatment', 'inner'"),
        ({"inner": "inducter"}, "no backend 'inducter'.*'inductor'"),
        ({"inner": 3}, "'inner' takes a backend's name or a function, not 3"),
        ({"policy": 3}, "'policy' takes a policy"),
        ({"treatment": 3}, "'treatment' takes a treatment"),
        ({"inner": lambda part, example_inputs: None}, "returned NoneType for 'whole'"),
    ],
)
def test_wrong_options_are_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=words) as raised:
        compiled(torch.sin, **options)(torch.randn(4))
    assert isinstance(raised.value.inner_exception, OptionError)


def test_a_cycle_is_refused_by_name() -> None:
    def back_and_forth(program: Program) -> Partition:
        first, second, third = program.operators()
        return Partition(program, [Region("outer", (first, third)), Region("inner", (second,))])

    with pytest.raises(BackendCompilerFailed, match="'outer'") as raised:
        compiled(lambda x: x.sin().cos().tan(), policy=back_and_forth, inner="eager")(torch.randn(4))
    assert isinstance(raised.value.inner_exception, CycleError)


def test_the_backend_takes_a_traced_module_without_dynamo() -> None:
    model = Frozen()
    traced = torch.fx.symbolic_trace(nn.Sequential(model.first, nn.Tanh(), model.second))
    x = torch.randn(4, 6)
    # AOTAutograd takes tuples only, so the graph is given one as Dynamo would.
    output = traced.graph.output_node()
    output.args = ((output.args[0],),)
    (result,) = backend(traced, [x], options={"policy": EVERY_NODE, "inner": "aot_eager"})(x)
    assert torch.equal(result, model.second(model.first(x).tanh()))


def test_regions_by_module_are_found_in_dynamo_graphs() -> None:
    recorder = Recorder()
    assert_trains_like_eager(Frozen(), policy=ByModule(classes=nn.Linear), inner=recorder)
    assert len(recorder.parts) == 3


@pytest.mark.skipif(
    not any(point.name == "partita" for point in entry_points(group="torch_dynamo_backends")),
    reason="partita is on the path but not installed",
)
def test_the_backend_is_found_by_its_name() -> None:
    x = torch.randn(4)
    call = torch.compile(torch.sin, backend="partita", options={"policy": EVERY_NODE, "inner": "eager"})
    assert torch.equal(call(x), x.sin())


def _sharing(tensors: Sequence[Tensor]) -> list[list[bool]]:
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[one == other for other in memory] for one in memory]


class _WithState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(self.linear(x) * self.scale) * y


@pytest.mark.parametrize("dynamic", [False, True])
def test_kinds_of_inputs_are_told_apart(dynamic: bool) -> None:
    kinds: list[tuple[str, ...]] = []

    def inner(body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert len(input_kinds(body)) == len(inputs)
        kinds.append(tuple(sorted(input_kinds(body))))
        return body.forward

    options = {"policy": AroundOperators(torch.relu), "inner": inner}
    torch.compile(_WithState(), backend=backend, dynamic=dynamic, options=options)(torch.ones(3, 4), torch.ones(4))
    assert ("buffer" in kinds[0], kinds[0].count("parameter")) == (True, 2)
    assert ("dynamic" in kinds[0], "static" in kinds[0]) == (dynamic, not dynamic)
    assert "parameter" not in kinds[-1]


class _TwoFrames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.parametrize(("treatment", "frames"), [(Recompute(), 2), ({"first": Recompute()}, 2), (Call(), 1)])
def test_a_frame_without_a_match_runs_as_nodes_outside_of_regions_do(treatment: Any, frames: int) -> None:
    seen: list[GraphModule] = []

    def inner(body: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(body)
        return body.forward

    options = {"policy": ByModule("first"), "treatment": treatment, "inner": inner}
    torch.compile(_TwoFrames(), backend=backend, options=options)(torch.ones(3, 4))
    assert len(seen) == frames


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.after = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(checkpoint(self.dropped, x, use_reentrant=False))

    def dropped(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.inside(x).sin(), 0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": ByModule("after")},
        {"policy": ByModule("missing", allow_empty=True)},
        {"policy": BySize(parts=2), "treatment": LeaveEager()},
        {"policy": BySize(parts=2), "treatment": Lower("eager")},
        {"policy": BySize(parts=2)},
        {"inner": "eager"},
        {"inner": "eager", "policy": BySize(parts=2), "treatment": Recompute()},
        {"inner": lambda graph, _: graph},
        {"inner": lambda graph, _: graph.forward, "policy": BySize(parts=2)},
    ],
)
def test_a_checkpoint_of_the_model_restores_the_random_numbers(options: dict[str, Any]) -> None:
    model, x = _Checkpointed(), torch.randn(4, 6)
    torch.manual_seed(1)
    model(x).square().sum().backward()
    expected, model.inside.weight.grad = model.inside.weight.grad, None
    torch.manual_seed(1)
    result = torch.compile(model, backend=backend, options={"inner": "aot_eager", **options})(x)
    state = torch.get_rng_state()
    result.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model.inside.weight.grad, expected)


def _frozen_half(inside: nn.Module, x: Tensor) -> Tensor:
    def dropped(value: Tensor) -> Tensor:
        with torch.no_grad():
            mask = nn.functional.dropout(inside(value), 0.5)
        return mask * nn.functional.dropout(inside(value), 0.5)

    return checkpoint(dropped, x, use_reentrant=False)


def _nested(inside: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda value: _frozen_half(inside, value).cos(), x, use_reentrant=False)


def _twice_mutated(inside: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    y.add_(1)
    return _frozen_half(inside, x) * y


@pytest.mark.parametrize("model", [_frozen_half, _nested])
def test_a_checkpoint_with_a_frozen_block_is_compiled(
    model: Callable[..., Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    inside, x, found = nn.Linear(6, 6), torch.randn(4, 6), []
    for call in (model, torch.compile(model, backend=backend, options={"inner": "aot_eager"})):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(call(inside, x).square().sum(), inside.weight)[0])
    torch.testing.assert_close(*found)
    assert "uncompiled" not in caplog.text


def test_a_checkpoint_restores_the_random_numbers_where_a_graph_with_shared_memory_runs_uncompiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inside, memory, found = nn.Linear(6, 6), torch.randn(4, 6), []
    compiled = torch.compile(_twice_mutated, backend=backend, options={"inner": "aot_eager"})
    compiled(inside, memory.clone(), memory.clone())
    for call in (_twice_mutated, compiled):
        torch.manual_seed(1)
        shared = memory.clone()
        found.append(torch.autograd.grad(call(inside, shared[:], shared[:]).sum(), inside.weight)[0])
    torch.testing.assert_close(*found)
    assert "runs uncompiled" in caplog.text


def test_an_overload_is_found_where_dynamo_writes_its_function() -> None:
    def model(x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x.sin(), x, x).cos()

    labels: list[list[str | None]] = []
    attention = torch.ops.aten.scaled_dot_product_attention.default
    options = {
        "policy": AroundOperators(attention),
        "inner": "aot_eager",
        "on_plan": lambda frame: labels.append([region.label for region in frame.plan.partition]),
    }
    torch.compile(model, backend=backend, options=options)(torch.randn(1, 2, 4, 8))
    assert labels == [["between", "chosen", "between"]]


@pytest.mark.parametrize("treatment", [Call(), Recompute(), Lower("aot_eager")])
def test_parts_of_a_graph_with_nested_tensors_run_uncompiled(treatment: Any, caplog: pytest.LogCaptureFixture) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(5, 4)

    def model(x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 5]))
        return layer(rows).sin().values().cos()

    options = {"policy": BySize(parts=3), "treatment": treatment, "inner": "aot_eager"}
    expected, found = model(x), torch.compile(model, backend=backend, options=options)(x)
    assert torch.equal(found, expected)
    if not isinstance(treatment, Recompute):  # marks suffice, and the whole graph is compiled
        assert any("nested tensors" in message for message in caplog.messages)
    gradients = [torch.autograd.grad(result.sum(), layer.weight)[0] for result in (expected, found)]
    torch.testing.assert_close(*gradients)


def test_a_peak_for_nested_tensors_is_refused() -> None:
    rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    with pytest.raises(Exception, match="nested tensors, whose sizes are not known when a step is planned"):
        torch.compile(nn.Linear(4, 4), backend=backend, options={"inner": "aot_eager", "peak": "1GB"})(rows)


@pytest.mark.parametrize(
    ("options", "is_cut_through"),
    [
        ({}, False),
        ({"policy": BySize(parts=2)}, True),
        ({"policy": AroundOperators(functional.scaled_dot_product_attention)}, True),
        ({"policy": ByCapability("aot_eager"), "treatment": Lower("aot_eager")}, True),
    ],
)
def test_attention_keeps_the_kernel_that_a_model_sets(
    options: dict[str, Any], is_cut_through: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def model(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            attended = functional.scaled_dot_product_attention(x.sin(), x, x)
        return attended.cos()

    x = torch.randn(2, 1, 33, 16)
    assert torch.equal(torch.compile(model, backend=backend, options={"inner": "aot_eager", **options})(x), model(x))
    assert ("sets kernels of attention" in caplog.text) == is_cut_through
    assert ("uncompiled" in caplog.text) == is_cut_through
