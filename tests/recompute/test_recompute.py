"""Recompute: what each policy keeps, what is computed again, and the same training bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.plans.helpers import bytes_alive
from tests.recompute.helpers import Network, calls_again, captured, recomputed, rows, trained
from tests.recompute.operators.helpers import assert_bitwise
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch.autograd import forward_ad
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode

import partita
from partita import Program, Region
from partita.errors import OptionError, RecomputeError, TreatmentError
from partita.policies import ByLabel, ByModule, BySize
from partita.recompute._torch.captured_state import refuse_mutations
from partita.testing.captured import Attention, Buffered, Casting, Frozen, Mixer, Structured
from partita.treatments import (
    Call,
    KeepAtMost,
    KeepEverything,
    KeepExpensive,
    KeepNodes,
    KeepNothing,
    KeepOperators,
    Recompute,
)

LINEAR = torch.ops.aten.linear.default


def first_linear(region: Region) -> Iterable[Node]:
    """A policy of somebody else's."""
    return [node for node in region.nodes if node.target is LINEAR][:1]


KEEPS: dict[str, Any] = {
    "nothing": KeepNothing(),
    "everything": KeepEverything(),
    "operators": KeepOperators("aten.linear"),
    "nodes": KeepNodes("linear", "linear_2", "gelu_1"),
    "expensive": KeepExpensive(2.0),
    "at most": KeepAtMost(300),
    "of somebody else": first_linear,
}
_MODELS = (Attention, Buffered, Casting, Frozen, Mixer)
every_keep = pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)


@every_keep
def test_training_is_the_same_bit_for_bit(keep: Any) -> None:
    assert_bitwise(trained(recomputed(keep).apply().module()), trained(captured().module()))


@pytest.mark.parametrize(
    ("model", "keep"),
    slow_but(
        product(_MODELS, (name for name in KEEPS if name != "nodes")),
        *product(_MODELS, ("nothing", "everything")),
        *((Buffered, name) for name in KEEPS),
    ),
)
def test_models_with_writes_modes_and_ties_are_verified(model: type[nn.Module], keep: str) -> None:
    program = partita.capture(model(), (torch.randn(4, 6),))
    for parts in (1, 3):
        after = partita.plan(program, BySize(parts=parts), Recompute(KEEPS[keep])).apply()
        partita.verify(program, after, (torch.randn(4, 6, requires_grad=True),))


def test_a_model_that_takes_and_gives_containers_is_verified() -> None:
    given = (torch.randn(4, 6), {"parts": [torch.randn(4, 6), torch.randn(4, 6)]})
    program = partita.capture(Structured(), given)
    partita.verify(program, partita.plan(program, BySize(parts=3), Recompute()).apply(), given)


# What is kept -------------------------------------------------------------------------------------------------------

#: What the backward of three blocks runs once more; a region is computed again until all is there that was saved.
AGAIN: dict[str, dict[str, int]] = {
    "nothing": {"addmm": 3, "gelu": 3, "bernoulli_": 3},
    "everything": {"addmm": 0, "gelu": 0, "bernoulli_": 0},
    "operators": {"addmm": 0, "gelu": 3, "bernoulli_": 3},
    "nodes": {"addmm": 1, "gelu": 2, "bernoulli_": 3},
    "expensive": {"addmm": 0, "gelu": 3, "bernoulli_": 3},
    "at most": {"addmm": 0, "gelu": 3, "bernoulli_": 3},
    "of somebody else": {"addmm": 0, "gelu": 3, "bernoulli_": 3},
}


@pytest.mark.parametrize("name", KEEPS)
def test_what_is_kept_is_not_computed_again(name: str) -> None:
    again = calls_again(recomputed(KEEPS[name]).apply().module(), rows().detach())
    assert {operator: again[operator] for operator in AGAIN[name]} == AGAIN[name]


@every_keep
def test_what_is_held_is_what_the_plan_says(keep: Any) -> None:
    plan = recomputed(keep)
    total = plan.saved_memory().total
    assert total is not None
    assert total.treated_bytes == bytes_alive(plan.apply().module(), {"x": rows().detach()})


def _kept(keep: Any) -> list[list[str]]:
    plan = recomputed(keep)
    return [sorted(node.name for node in Recompute(keep).kept(region)) for region in plan.partition]


def test_operators_are_kept_under_any_name() -> None:
    expected = [["linear", "linear_1"], ["linear_2", "linear_3"], ["linear_4", "linear_5"]]
    for operator in ("aten.linear", LINEAR, torch.ops.aten.linear, torch.nn.functional.linear, "aten::linear"):
        assert _kept(KeepOperators(operator)) == expected
    assert _kept(KeepOperators("aten.gelu", torch.dropout))[0] == ["dropout", "gelu"]
    assert _kept(KeepOperators("aten.mm")) == [[], [], []]


def test_everything_is_kept_that_nobody_writes() -> None:
    def f(x: Tensor) -> Tensor:
        hidden = x.sin()
        hidden.mul_(2)
        with torch.no_grad():
            scale = x.mean()
        return hidden.exp() * scale * x.shape[0]

    program = partita.capture(f, (torch.ones(3, 4),))
    (region,) = partita.plan(program, BySize(parts=1), Recompute()).partition
    kept = {node.name for node in Recompute(KeepEverything()).kept(region)}
    assert {"exp", "mean"} <= kept
    assert not {"sin", "mul_"} & kept


# One region at a time -----------------------------------------------------------------------------------------------


class Order(TorchDispatchMode):
    """The names of some operators, in the order in which they run."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names, self.seen = names, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        self.seen += [name] if name in self._names else []
        return func(*args, **(kwargs or {}))


def test_each_region_is_recomputed_just_before_its_backward() -> None:
    loss = recomputed(KeepNothing()).apply().module()(x=rows().detach())
    with Order("gelu", "gelu_backward") as order:
        loss.backward()
    assert order.seen == ["gelu", "gelu_backward"] * 3


# As data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KEEPS)
def test_the_treatment_is_plain_data(name: str) -> None:
    treatment = Recompute(KEEPS[name])
    assert pickle.loads(pickle.dumps(treatment)) == treatment == copy.deepcopy(treatment)
    assert hash(treatment) == hash(copy.deepcopy(treatment))
    assert repr(treatment).startswith("Recompute(keep=")


def test_the_plan_prints_what_is_held_and_explains() -> None:
    plan = recomputed(KeepOperators("aten.linear", torch.nn.functional.gelu))
    lines = str(plan).splitlines()
    assert lines[0].split()[-3:] == ["flops", "treatment", "label"]
    assert "Recompute(keep=KeepOperators('aten.linear', gelu))" in lines[2]
    (saved,) = (line for line in lines if line.startswith("saved for backward: "))
    assert saved.endswith("0 FLOPs are recomputed")
    assert plan.explain("gelu").startswith("gelu: in region 'blocks_0', treated by Recompute(keep=KeepOperators(")
    assert "held" not in str(partita.plan(captured(), ByModule("blocks.*"), Call()))


def test_names_of_state_and_ties_survive() -> None:
    module = recomputed(KeepNothing()).apply(state_names="original").module()
    assert set(module.state_dict()) == set(Network().state_dict())
    assert module.get_parameter("head.weight") is module.get_parameter("blocks.0.up.weight")
    module.load_state_dict(Network().state_dict())
    assert_bitwise(trained(module), trained(captured().module()))


def test_the_applied_program_can_be_copied_and_saved(tmp_path: Path) -> None:
    program, after = captured(), recomputed(KeepOperators("aten.linear")).apply()
    assert_bitwise(trained(copy.deepcopy(after.module())), trained(captured().module()))
    loaded = []
    for number, saved in enumerate((after, program)):  # Loading unties weights, so that a loaded one is compared.
        torch.export.save(saved.exported(), tmp_path / f"{number}.pt2")
        loaded.append(torch.export.load(tmp_path / f"{number}.pt2").module())
    assert_bitwise(*map(trained, loaded))
    assert calls_again(loaded[0], rows().detach())["addmm"] == 0


def test_graphs_of_a_symbolic_trace_are_recomputed_and_pickled() -> None:
    program = Program.of(torch.fx.symbolic_trace(Network()))
    after = partita.plan(program, BySize(parts=2), Recompute(KeepOperators(nn.Linear))).apply()
    partita.verify(program, after, (rows(),))
    again = pickle.loads(pickle.dumps(after.module()))
    assert_bitwise(trained(again), trained(Network()))


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [None, 3, KeepNothing, "aten.mm"])
def test_what_is_no_policy_is_refused(keep: Any) -> None:
    with pytest.raises(OptionError, match="keep is a function from a region to nodes, such as"):
        Recompute(keep)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: KeepOperators(), "operators are operators"),
        (lambda: KeepOperators(3), "operators are operators"),  # type: ignore[arg-type]
        (lambda: KeepNodes(), "KeepNodes takes names of nodes"),
        (lambda: KeepNodes("a", 3), "KeepNodes takes names of nodes, not 3"),  # type: ignore[arg-type]
        (lambda: KeepExpensive(0), "flops_per_byte is a number above zero"),
        (lambda: KeepExpensive(float("nan")), "flops_per_byte is a number above zero"),
        (lambda: KeepExpensive("2"), "flops_per_byte is a number above zero"),  # type: ignore[arg-type]
        (lambda: KeepAtMost(-1), "bytes is a whole number"),
        (lambda: KeepAtMost(1.5), "bytes is a whole number"),  # type: ignore[arg-type]
    ],
)
def test_odd_options_of_policies_are_refused(build: Callable[[], Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        build()


def test_a_policy_that_keeps_a_node_outside_of_the_region_is_refused() -> None:
    program = captured()
    plan = partita.plan(program, ByModule("blocks.*"), Recompute(lambda region: [program.node("mean")]))
    for act in (plan.apply, plan.annotate):
        with pytest.raises(RecomputeError, match="keeps 'mean', which is not in region 'blocks_0'"):
            act()


def test_a_policy_that_raises_or_gives_something_odd_is_named() -> None:
    def divides(region: Any) -> Any:
        return 1 / 0

    with pytest.raises(TreatmentError, match="raised ZeroDivisionError for region 'blocks_0'"):
        recomputed(divides).apply()
    for odd in (3, None, "linear"):
        with pytest.raises(RecomputeError, match=rf"<lambda> returned {type(odd).__name__} as what is kept"):
            recomputed(lambda region, odd=odd: odd).apply()


def test_a_kept_node_that_is_written_is_refused_with_the_writer() -> None:
    def f(x: Tensor) -> Tensor:
        hidden = x.sin()
        return hidden.mul_(2).exp()

    program = partita.capture(f, (torch.ones(3),))
    with pytest.raises(RecomputeError, match="keeps 'sin', but 'mul_' mutates its memory"):
        partita.plan(program, BySize(parts=1), Recompute(KeepNodes("sin"))).apply()


def _double(x: Tensor) -> Tensor:
    return x * 2


def _graph(write: Callable[[torch.fx.Graph, Node], Any], **state: Any) -> Program:
    graph = torch.fx.Graph()
    graph.output(write(graph, graph.placeholder("x")))
    return Program.of(torch.fx.GraphModule(state, graph))


@pytest.mark.parametrize(
    ("write", "state", "words"),
    [
        (lambda graph, x: (graph.call_function(print, (x,)), x)[1], {}, "node 'print_1' in region 'all' prints"),
        (
            lambda graph, x: graph.call_function(
                torch.rand_like, (x,), {"generator": graph.create_node("get_attr", "own")}
            ),
            {"own": torch.Generator()},
            "node 'rand_like' in region 'all' uses its own random number generator",
        ),
        (lambda graph, x: graph.call_function(_double, (x,)), {}, "node '_double' in region 'all' has unknown effects"),
    ],
    ids=["print", "generator", "unknown"],
)
def test_what_must_not_be_done_twice_is_refused_with_its_node(write: Any, state: Any, words: str) -> None:
    root = nn.Module()
    for name, value in state.items():
        setattr(root, name, value)
    graph = torch.fx.Graph()
    graph.output(write(graph, graph.placeholder("x")))
    program = Program.of(torch.fx.GraphModule(root, graph))
    with pytest.raises(RecomputeError, match=words):
        partita.plan(program, ByLabel(lambda node: "all"), Recompute()).apply()


def test_a_function_that_is_declared_pure_may_run_again() -> None:
    program = _graph(lambda graph, x: graph.call_function(_double, (graph.call_function(torch.sin, (x,)),)))
    program = Program.of(program.graph_module, pure=[_double])
    after = partita.plan(program, ByLabel(lambda node: "all"), Recompute()).apply()
    partita.verify(program, after, (torch.ones(3, requires_grad=True),))


@pytest.mark.parametrize(
    ("is_graph", "is_planned", "words"),
    [
        (False, False, "trace it into a graph"),
        (True, False, "recompute it by a plan"),
        (True, True, "`wait_tensor` is in the body, put it into one region with the collective"),
    ],
)
def test_a_write_without_a_copy_is_refused_with_a_way_out(is_graph: bool, is_planned: bool, words: str) -> None:
    with pytest.raises(RecomputeError, match=words) as caught:
        refuse_mutations(["argument 0"], is_graph=is_graph, is_planned=is_planned)
    assert ("by a plan" in str(caught.value)) == (is_graph and not is_planned)


def test_a_second_run_that_ends_inside_of_inference_blocks_leaves_them_all() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.inference_mode(), torch.inference_mode(False):
            y = x.sin().exp()
            return y * y

    x = torch.randn(3, requires_grad=True)
    plain = torch.autograd.grad(program(x).sum(), x)[0]
    region = partita.plan(partita.capture(program, (x,)), ByLabel(lambda _: 0), Recompute()).apply()
    found = torch.autograd.grad(region.module()(x).sum(), x)[0]
    assert not found.is_inference()
    assert torch.equal(found, plain)


def _flattening(x: Tensor) -> tuple[Tensor, Tensor]:
    scaled = x * 2
    with torch.inference_mode():
        flat = scaled.flatten()
    return flat, scaled.sin()


@pytest.mark.parametrize("within", [Call(), Recompute(), None], ids=["called", "recomputed", "bare"])
def test_a_view_that_a_kept_body_makes_in_inference_mode_keeps_its_history(within: Any) -> None:
    program = partita.capture(_flattening, (torch.ones(2, 3, requires_grad=True),))
    if within is not None:
        inner = ByLabel(lambda node: "flat" if "flatten" in node.name or "inference" in node.name else None)
        program = partita.plan(program, inner, within).apply()
    after = partita.plan(program, ByLabel(lambda _: "all"), Recompute(KeepEverything())).apply()
    assert [result.requires_grad for result in after.module()(torch.ones(2, 3, requires_grad=True))] == [True, True]


class Shifting(nn.Module):
    """Mutates what its batch norm gives, and reads the statistics that were brought up to date."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        y.mul_(2)
        return torch.sigmoid(y - self.norm.running_mean)


def test_a_batch_norm_whose_result_is_mutated_is_not_kept_for_its_statistics() -> None:
    model, x = Shifting(), torch.linspace(-1, 1, 8).reshape(2, 4)
    program = partita.Program.of(torch.fx.symbolic_trace(model))
    first = ByLabel(lambda node: "norm" if node.name in ("layer", "norm") else None)
    partita.verify(program, partita.plan(program, first, Recompute()).apply(), (x,))


class Scanned(nn.Module):
    """A recurrence by torch's scan, which traces its body with its backward when it is called."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight[0]
        given = self.layer(x).relu_()
        state, steps = scan(lambda state, row: (state + row * weight, (state * row).sin()), given[0] * 0, given)
        return state.sum() + steps.exp().sum()


@pytest.mark.parametrize(
    ("keep", "policy"),
    slow_but(
        product((KeepNothing(), KeepEverything()), (BySize(parts=1), BySize(operators=1))),
        (KeepNothing(), BySize(operators=1)),
        (KeepEverything(), BySize(parts=1)),
    ),
    ids=str,
)
def test_a_scan_is_recomputed(keep: Any, policy: Any) -> None:
    program = partita.capture(Scanned(), (rows(),))
    after = partita.plan(program, policy, Recompute(keep)).apply()
    partita.verify(program, after, (rows(),), tolerance=partita.Tolerance())


def test_a_scan_in_a_function_by_hand_is_recomputed() -> None:
    """torch.utils.checkpoint (2.13) fails on it."""
    model, x = Scanned(), rows()

    def gradients(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(x), (x, *model.parameters()))

    found = gradients(lambda x: partita.recompute.wrap_activation_checkpoint(model, x))
    assert all(map(torch.equal, found, gradients(model)))


class Writing(nn.Module):
    """Writes to what another region made."""

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        h[..., 0] = 0
        return h.sin()


def over_rows(module: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(module)(x)


def along(module: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jvp(module, (x,), (torch.ones_like(x),))[1]


def dual(module: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def jacobian(module: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jacfwd(module)(x)


@pytest.mark.parametrize("keep", [KeepNothing(), KeepEverything()], ids=str)
@pytest.mark.parametrize("policy", [BySize(parts=1), BySize(operators=2)], ids=["one", "two"])
@pytest.mark.parametrize("transform", [over_rows, along, dual, jacobian])
def test_recomputed_regions_can_be_transformed_and_trained(transform: Any, policy: Any, keep: Any) -> None:
    """The levels of a transform are gone when the backward runs, so the region is run as it is."""
    example = rows()[0] if transform is over_rows else rows()
    program = partita.capture(Writing(), (example.detach(),))
    module = partita.plan(program, policy, Recompute(keep)).apply().module()

    def seen(module: nn.Module) -> tuple[Tensor, Tensor]:
        x = rows()
        result = transform(module, x)
        return result.detach(), torch.autograd.grad(result.square().sum(), x)[0]

    assert_bitwise(seen(module), seen(Writing()))


def _constant_times_layer(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


def _detached_in_place(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model(x)
    doubled = hidden * 2
    return (hidden * doubled.detach_()).sin()


@pytest.mark.parametrize("does", [_constant_times_layer, _detached_in_place])
def test_a_region_may_detach_an_input_in_place(does: Callable[[nn.Module, Tensor], Tensor]) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return does(self.layer, x)

    program = partita.capture(Model(), (x,))
    for count in range(1, len(program.operators())):
        first = {node.name for node in program.operators()[:count]}
        policy = ByLabel(lambda node, first=first: "first" if node.name in first else "second")
        partita.verify(program, partita.plan(program, policy, Recompute()).apply(), (x,))
