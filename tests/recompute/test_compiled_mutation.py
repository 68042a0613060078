"""Recomputed regions that are compiled and write, switch modes, or have nothing to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.helpers.torch_versions import IS_OLD
from tests.recompute.operators.helpers import assert_bitwise
from torch import Tensor, nn

import partita
from partita import recompute
from partita.policies import ByLabel, BySize
from partita.testing import Case, LawError, random_case
from partita.testing.fuzz import fuzz
from partita.testing.generator.build import random_crossing
from partita.testing.laws import treatments as compiled_laws
from partita.testing.laws.treatments import COMPILABLE, check_compiled_recompute_law
from partita.torch_compile import backend
from partita.treatments import KeepOperators, Recompute


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch.compiler.reset()


class Counts(nn.Module):
    """Divides by how often it was called; the backward reads the count, and what was computed with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * (self.calls + 1)
        self.calls.add_(1)
        return self.head(torch.sigmoid(self.layer(scaled) / self.calls))


def _gradients(model: nn.Module, call: Callable[..., Any]) -> list[Tensor]:
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
    found = []
    for _ in range(2):
        model.zero_grad()
        call(torch.linspace(-1, 1, 8).reshape(2, 4)).square().sum().backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [*found, *(buffer.clone() for buffer in model.buffers())]


@pytest.mark.parametrize("parts", [1, 2])
def test_what_reads_a_buffer_before_it_is_written_is_saved(parts: int) -> None:
    model = Counts()
    program = partita.capture(model, (torch.ones(2, 4),))
    module = partita.plan(program, BySize(parts=parts), Recompute()).apply().module()
    expected = _gradients(model, model)
    assert_bitwise(_gradients(model, torch.compile(module, backend="aot_eager", fullgraph=True)), expected)


def test_the_marks_of_the_backend_say_so_too() -> None:
    model = Counts()
    options = {"policy": BySize(parts=1), "treatment": Recompute(), "inner": "aot_eager"}
    compiled = torch.compile(model, backend=backend, fullgraph=True, options=options)
    assert_bitwise(_gradients(model, compiled), _gradients(model, model))


@pytest.mark.parametrize("operator", [recompute.wrap_activation_checkpoint, recompute.tag_activation_checkpoint])
def test_so_does_a_checkpoint_by_hand(operator: Any) -> None:
    model = Counts()
    compiled = torch.compile(lambda x: operator(model, x), backend="aot_eager", fullgraph=True)
    assert_bitwise(_gradients(model, compiled), _gradients(model, model))


@pytest.mark.parametrize(
    "read",
    [
        nn.functional.dropout,
        pytest.param(lambda z: torch.einsum("ij,ij->ij", z, z), marks=pytest.mark.slow),
        pytest.param(lambda z: z[torch.tensor([1, 0])], marks=pytest.mark.slow),
    ],
    ids=["dropout", "einsum", "index"],
)
def test_what_may_return_a_view_or_new_values_is_saved_where_the_input_is_mutated_later(read: Any) -> None:
    scale = torch.arange(1.0, 5.0, requires_grad=True)

    def function(z: Tensor) -> Tensor:
        result = recompute.wrap_activation_checkpoint(lambda z, scale: read(z) * scale, z, scale)
        z.masked_fill_(z > 0.1, 0.25)
        return result.square().sum()

    def gradient(call: Callable[..., Any]) -> Tensor:
        torch.manual_seed(0)
        (found,) = torch.autograd.grad(call(torch.linspace(-1, 1, 8).reshape(2, 4)), scale)
        return found

    def plain(z: Tensor) -> Tensor:
        result = read(z) * scale
        z.masked_fill_(z > 0.1, 0.25)
        return result.square().sum()

    assert_bitwise(gradient(torch.compile(function, backend="aot_eager", fullgraph=True)), gradient(plain))


def test_a_batch_norm_is_computed_again_although_it_writes_its_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 4))
    compiled = torch.compile(
        lambda x: recompute.wrap_activation_checkpoint(model, x), backend="aot_eager", fullgraph=True
    )
    loss = compiled(torch.linspace(-1, 1, 8).reshape(2, 4))
    # What the region gives, and a batch norm inside of it, are computed; the rest was there before.
    owned = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved = [tensor for tensor in loss.grad_fn.saved_tensors if tensor.untyped_storage().data_ptr() not in owned]
    assert [tuple(tensor.shape) for tensor in saved if tensor.is_floating_point()] == [(2, 4)]
    model.eval()
    with torch.no_grad():
        assert torch.equal(compiled(torch.ones(2, 4)), model(torch.ones(2, 4)))


class Decays(nn.Module):
    """Brings a buffer up to date where nothing is trained, and then trains with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.add_(1).mul_(0.5)
        return torch.sigmoid(self.layer(torch.sin(self.scale) * self.scale * x))


def test_what_a_region_writes_that_trains_nothing_is_saved_for_the_next() -> None:
    model = Decays()
    program = partita.capture(model, (torch.ones(2, 4),))
    by_write = ByLabel(lambda node: "writes" if node.name.endswith("_") else "reads")
    module = partita.plan(program, by_write, Recompute()).apply().module()
    expected = _gradients(model, model)
    assert_bitwise(_gradients(model, torch.compile(module, backend="aot_eager", fullgraph=True)), expected)


class Centers(nn.Module):
    """Computes with the statistics that its own batch norm has brought up to date; the backward reads them too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        return torch.sigmoid((y - self.norm.running_mean) * self.norm.running_var)


def test_a_batch_norm_is_saved_where_its_statistics_are_read() -> None:
    torch.manual_seed(0)
    model = Centers()
    compiled = torch.compile(
        lambda x: recompute.wrap_activation_checkpoint(model, x), backend="aot_eager", fullgraph=True
    )
    assert_bitwise(_gradients(model, compiled), _gradients(model, model))


@pytest.mark.parametrize("is_exported", [True, False])
@pytest.mark.parametrize("later", ["reads", None])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_so_is_one_whose_statistics_are_read_outside_of_its_region(
    is_exported: bool, later: str | None, compiler: str
) -> None:
    torch.manual_seed(0)
    model = Centers()
    program = partita.Program.of(torch.fx.symbolic_trace(model))
    if is_exported:
        program = partita.capture(model, (torch.ones(2, 4),))
    first = ("linear", "layer", "norm", "batch_norm", "add_")
    labels = ByLabel(lambda node: "updates" if node.name in first else later)
    planned = partita.plan(program, labels, Recompute())
    assert {"norm", "batch_norm"} & {node.name for node in planned.partition.regions[0].nodes}
    expected = _gradients(model, model)
    compiled = torch.compile(planned.apply().module(), backend=compiler, fullgraph=True)
    assert_bitwise(_gradients(model, compiled), expected)


class Shifts(Centers):
    """The same, but mutates what its batch norm gives."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        y.mul_(2)
        return torch.sigmoid((y - self.norm.running_mean) * self.norm.running_var)


@pytest.mark.parametrize("is_exported", [True, False])
@pytest.mark.parametrize("later", ["reads", None])
@pytest.mark.parametrize("mutating", ["updates", None])
def test_a_batch_norm_is_saved_whose_result_is_mutated_and_whose_statistics_are_read_outside(
    is_exported: bool, later: str | None, mutating: str | None
) -> None:
    torch.manual_seed(0)
    model = Shifts()
    program = partita.Program.of(torch.fx.symbolic_trace(model))
    if is_exported:
        program = partita.capture(model, (torch.ones(2, 4),))
    labels = dict.fromkeys(("linear", "layer", "norm", "batch_norm", "add_"), "updates") | {"mul_": mutating}
    planned = partita.plan(program, ByLabel(lambda node: labels.get(node.name, later)), Recompute())
    assert {"norm", "batch_norm"} & {node.name for node in planned.partition.regions[0].nodes}
    expected = _gradients(model, model)
    compiled = torch.compile(planned.apply().module(), backend="aot_eager", fullgraph=True)
    assert_bitwise(_gradients(model, compiled), expected)


class Warms(nn.Module):
    """Mutates a buffer outside of a part that reads it, or what was computed from it; `scaled` is recomputed."""

    def __init__(self, order: str, operator: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layer, self.order = nn.Linear(4, 4), order
        self.operator = (lambda body, *args: body(*args)) if operator is None else operator
        self.register_buffer("scale", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "part of it before":
            self.scale[1:].add_(1)
        if self.order in ("before", "before and after", "outside"):
            self.scale.add_(1)
        factor = torch.sin(self.scale) if self.order == "computed before" else self.scale
        if self.order == "computed before":
            self.scale.add_(1)
        y = self.operator(self.scaled, x, torch.ones(4) if self.order == "outside" else factor)
        if self.order in ("after", "before and after"):
            self.scale.add_(0.5)
        if self.order == "part of it before":
            self.scale[:2].add_(0.5)
        return y * torch.sin(self.scale) if self.order == "outside" else y

    def scaled(self, x: Tensor, factor: Tensor) -> Tensor:
        return torch.sigmoid(self.layer(x * torch.cos(factor)))


_ORDERS = ("before", "after", "before and after", "computed before", "part of it before", "outside")


@pytest.mark.parametrize("order", _ORDERS)
def test_a_plan_saves_what_reads_a_buffer_that_is_mutated_outside_of_all_regions(order: str) -> None:
    model = Warms(order)
    program = partita.capture(model, (torch.ones(2, 4),))
    region = ByLabel(lambda node: "scaled" if node.name in ("cos", "mul", "linear", "sigmoid") else None)
    module = partita.plan(program, region, Recompute()).apply().module()
    expected = _gradients(model, model)
    assert_bitwise(_gradients(model, torch.compile(module, backend="aot_eager", fullgraph=True)), expected)


@pytest.mark.parametrize("order", _ORDERS)
def test_so_do_the_marks_of_the_backend(order: str) -> None:
    model = Warms(order)
    region = ByLabel(lambda node: "scaled" if node.name.startswith(("cos", "mul", "linear", "y")) else None)
    options = {"policy": region, "treatment": Recompute(), "inner": "aot_eager"}
    compiled = torch.compile(model, backend=backend, fullgraph=True, options=options)
    assert_bitwise(_gradients(model, compiled), _gradients(model, model))


@pytest.mark.parametrize("order", _ORDERS)
@pytest.mark.parametrize("is_nested", [False, True])
def test_so_does_a_checkpoint_by_hand_that_is_told_what_happens_around_it(order: str, is_nested: bool) -> None:
    def nested(body: Any, *args: Any) -> Any:
        return recompute.wrap_activation_checkpoint(
            lambda *inner: recompute.wrap_activation_checkpoint(body, *inner) * 1, *args
        )

    torch.manual_seed(0)
    plain = Warms(order)
    model = Warms(order, nested if is_nested else recompute.wrap_activation_checkpoint)
    model.load_state_dict(plain.state_dict())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_bitwise(_gradients(model, compiled), _gradients(plain, plain))


def test_the_rest_of_a_region_is_computed_again_where_a_buffer_is_mutated_outside() -> None:
    model = Warms("before", recompute.wrap_activation_checkpoint)
    result = torch.compile(model, backend="aot_eager", fullgraph=True)(torch.linspace(-1, 1, 8).reshape(2, 4))
    owned = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved = [tensor for tensor in result.grad_fn.saved_tensors if tensor.untyped_storage().data_ptr() not in owned]
    assert sorted(tuple(tensor.shape) for tensor in saved) == [(2, 4), (4,)]  # x, and the buffer as it was read.


@pytest.mark.parametrize("trains", [False, True])
def test_regions_that_draw_compile_where_nothing_is_trained(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).requires_grad_(trains)
    module = partita.plan(partita.capture(model, (torch.ones(2, 4),)), BySize(parts=1), Recompute()).apply().module()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(not trains):
        torch.manual_seed(0)
        found = compiled(torch.ones(2, 4))
        torch.manual_seed(0)
        assert torch.equal(found, model(torch.ones(2, 4)))


def test_applied_bodies_carry_no_marks() -> None:
    program = partita.capture(nn.Linear(4, 4), (torch.ones(2, 4),))
    after = partita.plan(program, BySize(parts=1), Recompute()).apply()
    bodies = [module for module in after.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    assert not [node for body in bodies for node in body.graph.nodes if {"recompute", "ac_graph_id"} & node.meta.keys()]


# Modes --------------------------------------------------------------------------------------------------------------


def _switching() -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    enter = graph.call_function(torch.amp._enter_autocast, ("cpu", torch.bfloat16, True, None))
    product = graph.call_function(torch.matmul, (x, x))
    graph.call_function(torch.amp._exit_autocast, (enter,))
    graph.output((graph.call_function(torch.sin, (product,)),))
    return torch.fx.GraphModule(nn.Module(), graph)


def test_a_region_that_switches_autocast_compiles() -> None:
    module = partita.plan(_switching(), BySize(parts=1), Recompute()).apply().module()
    x = torch.linspace(-1, 1, 9).reshape(3, 3).requires_grad_()
    results = [call(x)[0] for call in (_switching(), torch.compile(module, backend="aot_eager", fullgraph=True))]
    expected, found = (torch.autograd.grad(result.float().sum(), x)[0] for result in results)
    assert torch.equal(found, expected)


class Twice(nn.Module):
    """One weight, used twice under autocast: the gradients of its cast are summed before they are cast back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(self.layer(x).relu())


@pytest.mark.parametrize("operator", ["aten.relu", "aten.linear"])
def test_what_is_kept_stays_in_the_autocast_block_of_its_region(operator: str) -> None:
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(8, 64)
    program = partita.capture(model, (x,))
    whole = ByLabel(lambda node: "all")
    module = partita.plan(program, whole, Recompute(KeepOperators(operator))).apply().module()
    expected, found = (
        torch.autograd.grad(call(x).float().square().sum(), tuple(model.parameters())) for call in (model, module)
    )
    assert_bitwise(list(found), list(expected))


# Generated programs -------------------------------------------------------------------------------------------------


# Regions that write what they read, or that others write later, in a body or through a view.
@pytest.mark.parametrize("seed", slow_but([*range(40, 45), 1011, 1013, 1116, 1118, 1126, 1133], 40, 41, 1011, 1116))
def test_generated_programs_compile_to_the_same(seed: int) -> None:
    silence = check_compiled_recompute_law(random_case(seed, features=COMPILABLE), "aot_eager", seed)
    # An older Dynamo takes less.
    assert silence is None or (IS_OLD and "does not take the original" in silence)


def test_a_program_that_differs_from_both_originals_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(torch.fx.symbolic_trace(lambda x: x * 2), (torch.ones(3, requires_grad=True),), {})
    wrong = partita.Program.of(torch.fx.symbolic_trace(lambda x: x * 3))
    monkeypatch.setattr(compiled_laws, "recomputed", lambda program, seed: wrong)
    with pytest.raises(LawError, match=r"compiled by aot_eager(.|\n)*value of output"):
        check_compiled_recompute_law(case, "aot_eager", 0)


def test_the_law_allows_a_view_of_a_parameter_that_torch_gives_where_arguments_share_memory() -> None:
    # torch gives the parameter itself, or a view of it, by its place among the inputs of the graph.
    silence = check_compiled_recompute_law(random_crossing(50888, features=COMPILABLE), "aot_eager", 50888)
    assert silence is not None
    assert "view of a parameter" in silence or IS_OLD


@pytest.mark.slow
def test_inductor_compiles_generated_programs_to_the_same() -> None:
    tally = fuzz(5000, 30, recompute="inductor")
    assert (tally.tried, tally.broken) == (30, ())
    assert tally.legal > 20
