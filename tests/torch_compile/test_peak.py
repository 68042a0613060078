"""Compiled training steps that fit a budget: gradients stay right, and the measured peak is the predicted one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from partita.errors import BudgetError, OptionError
from partita.memory import Rates
from partita.memory._torch.recorder import Recorder
from partita.memory.joint.plan import JointPlanner, JointStep
from partita.program.program import Program
from partita.torch_compile import memory_partition
from partita.torch_compile.peak import FittedGraph, _delay_products, compile_to_fit

RATES = Rates(matmul_flops=1e12, attention_flops=1e12, bytes=1e11, call=5e-6)
_WIDTH = 32


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(_WIDTH), nn.RMSNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.out = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.gate = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.up = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.down = nn.Linear(3 * _WIDTH, _WIDTH, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).reshape(batch, tokens, width)))
        y = self.norm2(x)
        return x + self.drop(self.down(functional.silu(self.gate(y)) * self.up(y)))


class Decoder(nn.Module):
    def __init__(self, dropout: float = 0.0, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, _WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.head = nn.Linear(_WIDTH, 50, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


_IDS = torch.randint(50, (4, 64))


@pytest.fixture(autouse=True)
def _forget_compiled() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**options).train()


def _gradients(function: Callable[..., Tensor], model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    function(_IDS).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _compiled(model: nn.Module, plans: list[Any], **options: Any) -> Any:
    options = {"rates": RATES, "on_plan": plans.append, "inner": "aot_eager", **options}
    return torch.compile(model, backend="partita", options=options)


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_gradients_keep_their_bits_at_every_budget(dropout: float) -> None:
    model = _decoder(dropout=dropout)
    expected = _gradients(torch.compile(model, backend="aot_eager"), model)
    peaks, seconds = [], []
    for peak in (1.0, 0.5) if dropout else (1.0, 0.7, 0.5):
        torch.compiler.reset()
        plans: list[Any] = []
        found = _gradients(_compiled(model, plans, peak=peak), model)
        assert all(map(torch.equal, found, expected))
        (plan,) = plans
        assert plan.peak_bytes <= plan.allowed_bytes
        peaks.append(plan.peak_bytes)
        seconds.append(plan.seconds)
    assert peaks == sorted(peaks, reverse=True)
    assert seconds == sorted(seconds)
    assert peaks[-1] < 0.6 * peaks[0]
    assert "recomputation takes" in str(plan)
    assert plan.timeline.peak_bytes == plan.peak_bytes
    assert plan.timeline.peak.node == plan.simulated.at.name
    assert sum(one.bytes for one in plan.timeline.occupants) == plan.peak_bytes
    assert plan.plain_timeline.peak_bytes == plan.plain_peak_bytes
    phases = [moment.phase for moment in plan.timeline.moments]
    assert set(phases) == {"forward", "recompute", "backward"}
    assert phases.index("backward") > phases.count("forward") - 1
    picture = plan.picture()
    assert "fastest step" in picture.text(80)
    assert "<svg" in picture.svg()
    assert "in blocks." in str(plan)


def test_the_measured_peak_is_the_predicted_one() -> None:
    """Every operator runs by itself, and is recorded inside of the compiled functions."""
    from torch._dynamo.backends.common import aot_autograd

    model = _decoder(dropout=0.1)
    for peak in (1.0, 0.6):
        torch.compiler.reset()
        recorder = Recorder()

        def recorded(gm: GraphModule, inputs: Sequence[Any], recorder: Recorder = recorder) -> Callable[..., Any]:
            def run(values: list[Any]) -> Any:
                with recorder:
                    return torch.fx.Interpreter(gm).boxed_run(values)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        partition = memory_partition(peak, fuses=False, rates=RATES)
        backend = aot_autograd(
            fw_compiler=recorded, bw_compiler=recorded, partition_fn=partition, keep_inference_input_mutations=True
        )
        compiled = torch.compile(model, backend=backend)
        compiled(_IDS).backward()
        model.zero_grad()
        recorder.ignore([*model.parameters(), _IDS])
        before = recorder.record.allocated
        recorder.record.peak = before
        compiled(_IDS).backward()
        (plan,) = partition.plans.found
        assert plan.peak_bytes == pytest.approx(recorder.record.peak - before, rel=0.02)


@pytest.mark.parametrize(
    "dropout", [pytest.param(0.0, marks=pytest.mark.slow), pytest.param(0.2, marks=pytest.mark.slow)]
)
def test_gradients_are_right_under_inductor(dropout: float) -> None:
    model = _decoder(dropout=dropout, layers=3)
    expected = _gradients(torch.compile(model, backend="inductor"), model)
    for peak in (0.9, 0.6):
        torch.compiler.reset()
        plans: list[Any] = []
        found = _gradients(_compiled(model, plans, peak=peak, inner="inductor"), model)
        assert plans
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_that_is_measured_over_its_budget_is_planned_once_more(
    inner: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, fitted, plans = _decoder(), list[FittedGraph](), list[Any]()

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        found = compile_to_fit(gm, inputs, peak=budget, inner=inner, rates=RATES, on_plan=plans.append)
        assert isinstance(found, FittedGraph)
        fitted.append(found)
        return found

    resident = sum(one.numel() * one.element_size() for one in model.parameters()) + _IDS.numel() * 8
    budget = 5_000_000 if inner == "aot_eager" else 2_500_000
    compiled = torch.compile(model, backend=backend)
    expected = _gradients(compiled, model)
    (first,) = plans
    fitted[0].compare(measured=budget - 1, resident=resident)
    assert len(plans) == 1
    assert "planned once more" not in caplog.text
    fitted[0].compare(measured=budget + 300_000, resident=resident)
    assert "the step is over its budget by 300.000 kB; it is planned once more" in caplog.text
    for one, other in zip(_gradients(compiled, model), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(plans) == 2
    # The difference between prediction and measurement counts now.
    assert plans[1].peak_bytes <= budget - resident
    assert plans[1].simulated.peak < first.simulated.peak


def test_state_that_an_optimizer_has_not_allocated_yet_counts_when_a_step_is_measured() -> None:
    model, fitted, plans = _decoder(), list[FittedGraph](), list[Any]()
    optimizer = torch.optim.AdamW(model.parameters())
    parameter_bytes = sum(one.numel() * one.element_size() for one in model.parameters())
    budget = 5_000_000 + 2 * parameter_bytes

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        found = compile_to_fit(
            gm, inputs, peak=budget, inner="aot_eager", rates=RATES, optimizer=optimizer, on_plan=plans.append
        )
        assert isinstance(found, FittedGraph)
        fitted.append(found)
        return found

    _gradients(torch.compile(model, backend=backend), model)
    resident = parameter_bytes + _IDS.numel() * 8
    fitted[0].compare(measured=5_000_000, resident=resident)
    assert len(plans) == 1
    fitted[0].compare(measured=5_300_000, resident=resident)
    assert len(plans) == 2
    assert plans[1].peak_bytes <= 5_000_000 - resident


def test_a_step_whose_budget_no_plan_holds_takes_the_smallest_peak(caplog: pytest.LogCaptureFixture) -> None:
    model, fitted, plans = _decoder(layers=2), list[FittedGraph](), list[Any]()

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        found = compile_to_fit(gm, inputs, peak=budget, inner="aot_eager", rates=RATES, on_plan=plans.append)
        assert isinstance(found, FittedGraph)
        fitted.append(found)
        return found

    resident = sum(one.numel() * one.element_size() for one in model.parameters()) + _IDS.numel() * 8
    budget = 3_000_000
    compiled = torch.compile(model, backend=backend)
    expected = _gradients(compiled, model)
    fitted[0].compare(measured=budget + 2_500_000, resident=resident)
    assert "no plan holds the budget" in caplog.text
    assert all(map(torch.equal, _gradients(compiled, model), expected))
    first, second = plans
    assert second.simulated.peak < first.simulated.peak
    assert second.peak_bytes > budget - resident  # The measured excess is part of what is predicted now.


def test_a_part_of_the_step_and_communication_are_compared_alike() -> None:
    """A step that takes what was predicted, beside what communication takes, is not over its budget."""
    model, fitted, plans = _decoder(layers=2), list[FittedGraph](), list[Any]()

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        found = compile_to_fit(
            gm, inputs, peak=0.8, inner="aot_eager", rates=RATES, communication="500kB", on_plan=plans.append
        )
        assert isinstance(found, FittedGraph)
        fitted.append(found)
        return found

    torch.compile(model, backend=backend)(_IDS).backward()
    fitted[0].compare(measured=plans[0].peak_bytes + 500_000 + 10_000, resident=10_000)
    assert len(plans) == 1


def test_the_state_of_an_optimizer_counts_until_it_is_allocated_on_a_gpu() -> None:
    model = _decoder(layers=2)
    parameter_bytes = sum(one.numel() * one.element_size() for one in model.parameters())
    plans: list[Any] = []
    for optimizer in (0, torch.optim.AdamW(model.parameters()), 2 * parameter_bytes):
        torch.compiler.reset()
        _compiled(model, plans, peak="9MB", optimizer=optimizer)(_IDS).backward()
    plain, given, said = plans
    assert given.resident_bytes == said.resident_bytes == plain.resident_bytes + 2 * parameter_bytes
    assert given.peak_bytes + given.resident_bytes <= 9_000_000
    assert f"so in all {(given.peak_bytes + given.resident_bytes) / 1e6:.3f} MB of 9.000 MB" in str(given)


def test_constants_are_written_into_kernels_and_never_saved() -> None:
    """Inductor materializes large values that read saved numbers, which it would compute with otherwise."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    partition = memory_partition(1.0, rates=RATES)
    backend = aot_autograd(
        fw_compiler=lambda gm, _: gm, bw_compiler=lambda gm, _: gm, partition_fn=partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    model = _decoder(layers=2)
    torch.compile(model, backend=backend)(_IDS).backward()
    (plan,) = partition.plans.found
    joint = plan.saved[0].graph
    constants = [node for node in joint.nodes if node.op == "call_function" and not node.all_input_nodes]
    assert {str(node.target) for node in constants} >= {"aten.scalar_tensor.default"}
    assert not set(constants) & set(plan.saved)


def test_a_budget_that_cannot_be_met_is_refused() -> None:
    model = _decoder(layers=2)
    with pytest.raises(Exception, match="smallest peak is") as refused:
        _compiled(model, [], peak="400kB")(_IDS)
    assert isinstance(refused.value.__cause__ or refused.value, Exception)
    torch.compiler.reset()
    with pytest.raises(Exception, match="shard the model") as refused:
        _compiled(model, [], peak="1kB")(_IDS)
    smallest = _budget_error(refused.value).smallest
    assert smallest is not None
    plans: list[Any] = []
    torch.compiler.reset()
    _compiled(model, plans, peak=smallest)(_IDS).backward()
    assert plans[0].peak_bytes + plans[0].resident_bytes == smallest
    torch.compiler.reset()
    with pytest.raises(Exception, match="smallest peak is") as refused:
        _compiled(model, [], peak=smallest - 1)(_IDS)
    assert _budget_error(refused.value).smallest == smallest


def _budget_error(error: BaseException | None) -> BudgetError:
    while not isinstance(error, BudgetError):
        assert error is not None
        error = error.__cause__ or error.__context__
    return error


class Attending(nn.Module):
    """Attention with dropout, whose parts are operators of their own on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        found: Tensor = x + self.out(functional.gelu(seen.transpose(1, 2).flatten(2)))
        return found


def test_less_memory_asked_never_means_more_used_nor_less_time() -> None:
    """What a choice holds is more than what is chosen: inputs of what is recomputed are saved for it."""
    from torch._dynamo.backends.common import aot_autograd

    torch.manual_seed(0)
    blocks = nn.Sequential(*(Attending() for _ in range(4)))
    found: list[tuple[int, float]] = []

    class Asking:
        def __call__(self, joint: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
            prepared = Program.of(copy.deepcopy(joint), forward_outputs=options["num_fwd_outputs"])
            planner = JointPlanner(prepared, JointStep(RATES, fuses=False))
            least, most = planner.smallest_peak, planner.plain.peak
            for part in range(20):
                room = least + (most - least) * part // 19
                plan = planner.plan(room)
                assert plan.peak_bytes <= room
                found.append((plan.peak_bytes, -plan.seconds))
            with pytest.raises(BudgetError, match="smallest peak"):
                planner.plan(least - 1)
            return memory_partition(1.0, fuses=False, rates=RATES)(joint, inputs, **options)

    backend = aot_autograd(fw_compiler=lambda gm, _: gm, bw_compiler=lambda gm, _: gm, partition_fn=Asking())
    torch.compile(blocks, backend=backend)(torch.randn(4, 64, _WIDTH)).sum().backward()
    assert found == sorted(found)
    assert [seconds for _, seconds in found] == sorted(seconds for _, seconds in found)
    assert found[0][0] < 0.75 * found[-1][0]


def test_options_that_do_not_go_with_a_peak_are_refused() -> None:
    from partita.policies import ByModule
    from partita.torch_compile.options import BackendOptions

    with pytest.raises(OptionError, match="does not go with 'policy'"):
        BackendOptions.read({"peak": 0.5, "policy": ByModule("blocks.*")})
    with pytest.raises(BudgetError, match="above zero"):
        BackendOptions.read({"peak": 0})
    with pytest.raises(OptionError, match="is an optimizer, or the bytes"):
        BackendOptions.read({"peak": 0.5, "optimizer": "AdamW"})
    with pytest.raises(OptionError, match="for steps that fit a 'peak'"):
        BackendOptions.read({"optimizer": 10})
    model = _decoder(layers=2)
    with pytest.raises(Exception, match="'inductor' and 'aot_eager'"):
        _compiled(model, [], peak=0.5, inner="eager")(_IDS)


def test_inference_is_compiled_without_a_plan() -> None:
    model, plans = _decoder(layers=2).eval(), list[Any]()
    with torch.no_grad():
        assert torch.equal(_compiled(model, plans, peak=0.5)(_IDS), model(_IDS))
    assert not plans


class _Graph(nn.Module):
    def forward(self, gradient: Tensor, weight: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        first = gradient @ weight
        second = gradient.t() @ hidden
        return first, second


class _MutatedBetween(_Graph):
    def forward(self, gradient: Tensor, weight: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        first = gradient @ weight
        weight.view(-1).zero_()
        second = gradient.t() @ hidden
        return first, second


class _ReadBetween(_Graph):
    def forward(self, gradient: Tensor, weight: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        first = gradient @ weight
        hidden = hidden + first
        second = gradient.t() @ hidden
        return first, second


class _RandomBetween(_Graph):
    def forward(self, gradient: Tensor, weight: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        first = gradient @ weight
        noise = torch.rand_like(hidden)
        second = gradient.t() @ hidden
        return first, second, noise


@pytest.mark.parametrize(
    ("kind", "moves"), [(_Graph, True), (_RandomBetween, True), (_MutatedBetween, False), (_ReadBetween, False)]
)
def test_a_product_is_delayed_only_where_that_changes_no_value(kind: type[nn.Module], moves: bool) -> None:
    """It stays where something between reads it, or mutates what it reads."""
    tensors = torch.randn(6, 6), torch.randn(6, 6), torch.randn(6, 6)

    def run(function: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        copies = [tensor.clone() for tensor in tensors]
        return [*function(*copies), *copies]

    graph_module = make_fx(kind())(*(tensor.clone() for tensor in tensors))
    expected = run(kind())
    products = [node for node in graph_module.graph.nodes if node.target is torch.ops.aten.mm.default]
    _delay_products(graph_module, {products[0]: products[1]})
    graph_module.graph.lint()
    ran = [node for node in graph_module.graph.nodes if node in products]
    assert ran == (products[::-1] if moves else products)
    assert all(map(torch.equal, run(graph_module), expected))


def test_a_budget_keeps_sizes_dynamic() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    options = {"peak": "1GB", "inner": "aot_eager"}
    compiled = torch.compile(model, backend="partita", options=options, dynamic=True)
    compiled(torch.randn(6, 4)).sum().backward()
    x = torch.randn(10, 4)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(x), model(x))
