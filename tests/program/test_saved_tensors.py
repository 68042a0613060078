"""What autograd saves is found from traced values alone, by node, without side effects."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.plans.helpers import bytes_really_held, random_traced_case
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.export import Dim
from torch.fx import Graph, GraphModule, Tracer

from partita import Program, capture, hops, plan
from partita._torch import toggles
from partita._torch.modes import read_ambient, restore_autocast
from partita.backends import Eager
from partita.policies import ByLabel, ByMode
from partita.program.saved_tensors import Origin, SavedTensors, bytes_in, saved_tensors_of
from partita.testing.captured import Attention, Buffered, Casting, Frozen, Mixer
from partita.treatments import Lower, Mode


def _input(*, needs_gradients: bool = True) -> Tensor:
    return torch.randn(4, 6, requires_grad=needs_gradients)


def _saved(function: Callable[..., Any] | nn.Module, *args: Any, **options: Any) -> SavedTensors:
    saved = saved_tensors_of(capture(function, args, **options))
    assert saved.reason is None
    return saved


def _saves(saved: SavedTensors) -> dict[str, list[tuple[str, int | None]]]:
    """For each node that saves something, where that comes from, and its bytes."""
    found = {node.name: [(_name(memory), memory.bytes) for memory in run.saves] for node, run in saved.nodes.items()}
    return {name: memories for name, memories in found.items() if memories}


def _name(memory: Any) -> str:
    name = "" if memory.node is None else memory.node.name
    return f"{memory.origin.value} {name}"


def test_each_node_saves_inputs_results_and_what_is_inside_of_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 5, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.linear(x).tanh(), 0.5)

    saved = _saved(Model(), _input())
    assert _saves(saved) == {
        "linear": [("state p_linear_weight", 120), ("input x", 96)],
        "tanh": [("result tanh", 80)],
        "dropout": [("inside dropout", 80)],
    }
    assert bytes_in(saved.memory()) == 96 + 80 + 80
    linear = saved.of(saved.program.node("linear"))
    assert (linear.flops, linear.flops_until_saved) == (2 * 4 * 6 * 5, 0)


def test_one_storage_counts_once_however_many_views_look_at_it() -> None:
    saved = _saved(lambda x: (x.sin()[1:].cos() * x[:, 2:].t().cos().sum()).exp(), _input())
    memory = [memory for memory in saved.memory() if memory.origin is Origin.INPUT]
    assert [one.bytes for one in memory] == [96]


def test_what_no_result_needs_is_let_go_of_again() -> None:
    program = capture(lambda x: (x.exp().cos(), x + 1), (_input(),))
    assert _saves(saved_tensors_of(program)) == {"exp": [("result exp", 96)], "cos": [("result exp", 96)]}
    output = program.graph.output_node()
    output.args = ((program.node("add"),),)
    saved = saved_tensors_of(Program.of(program.graph_module))
    assert saved.memory() == frozenset()
    assert saved.of(saved.program.node("exp")).flops_until_saved == 0


def test_without_gradients_nothing_is_saved() -> None:
    assert not _saves(_saved(lambda x: x.sin().exp(), _input(needs_gradients=False)))
    program = capture(lambda x: x.sin().exp(), (_input(),))
    assert _saves(saved_tensors_of(program))
    without = program.modes.final.__class__(grad=False)
    assert not _saves(saved_tensors_of(program.under(without)))


def test_blocks_without_gradients_save_nothing() -> None:
    saved = _saved(Frozen(), torch.randn(4, 6))
    assert set(_saves(saved)) == {"linear", "tanh", "linear_2"}


@pytest.mark.parametrize("model", [Mixer, Attention, Buffered, Frozen, Casting])
@pytest.mark.parametrize("form", ["toggles", "operators"])
def test_what_is_saved_is_what_autograd_really_holds(model: type[nn.Module], form: str) -> None:
    torch.manual_seed(0)
    x = _input()
    program = capture(model(), (x,))
    if form == "operators":
        program = plan(program, ByMode(), Mode()).apply()
    saved = saved_tensors_of(program)
    module = program.module()
    assert saved.reason is None
    assert bytes_in(saved.memory()) == bytes_really_held(module, lambda: module(x))
    assert saved.memory()


def test_bodies_of_operators_count_as_part_of_the_node_that_runs_them() -> None:
    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ x.t() @ x, lambda x: x.cos(), (x,)).sin()

    def wrapped(x: Tensor) -> Tensor:
        return hops.wrap_with_set_grad_enabled(True, lambda x: x.exp().cos(), x)

    x = _input()
    for function in (branches, wrapped):
        program = capture(function, (x,))
        saved, module = saved_tensors_of(program), program.module()
        assert saved.reason is None
        assert bytes_in(saved.memory()) == bytes_really_held(module, lambda: module(x))  # noqa: B023
    program = capture(branches, (x,))
    (cond,) = (node for node in program.operators() if "cond" in node.name)
    # As torch counts them: those of the branch that takes more.
    assert saved_tensors_of(program).of(cond).flops == 2 * (4 * 6 * 4) * 2


def test_symbolic_sizes_count_as_they_were_in_the_trace() -> None:
    rows = Dim("rows", min=2, max=64)
    saved = _saved(Attention(), torch.randn(5, 6), dynamic_shapes={"x": {0: rows}})
    fixed = _saved(Attention(), torch.randn(5, 6))
    assert bytes_in(saved.memory()) == bytes_in(fixed.memory())


def test_a_size_that_only_the_data_tells_has_no_bytes() -> None:
    saved = _saved(lambda x: x[x > 0].exp(), _input())
    assert None in [memory.bytes for memory in saved.memory()]
    assert bytes_in(saved.memory()) is None


def test_parameters_that_dynamo_made_inputs_are_still_parameters() -> None:
    taken: list[GraphModule] = []

    def keep(graph_module: GraphModule, inputs: Any) -> GraphModule:
        taken.append(graph_module)
        return graph_module

    torch.compile(Mixer(), backend=keep, fullgraph=True)(_input())
    saved = saved_tensors_of(Program.of(taken[0]))
    assert saved.reason is None
    origins = {memory.origin for run in saved.nodes.values() for memory in run.saves}
    assert Origin.STATE in origins


def test_writes_are_noted_and_change_nothing() -> None:
    program = capture(Buffered(), (_input(),))
    before = {name: (value.clone(), value._version) for name, value in program.graph_module.named_buffers()}
    state = program.export.constants if program.export else {}
    versions = {name: value._version for name, value in state.items()}
    saved = saved_tensors_of(program)
    written = {memory for run in saved.nodes.values() for memory in run.mutates}
    assert [(memory.origin, memory.bytes) for memory in written] == [(Origin.STATE, 24)]
    assert versions == {name: value._version for name, value in state.items()}
    assert all(value._version == before[name][1] for name, value in program.graph_module.named_buffers())


def test_modules_are_copied_before_they_write_to_their_buffers() -> None:
    torch.manual_seed(0)
    module = Mixer()
    tracer = Tracer()
    traced = GraphModule(module, tracer.trace(module))
    with FakeTensorMode() as mode:
        traced.graph.find_nodes(op="placeholder")[0].meta["val"] = mode.from_tensor(_input())
    before = {name: (value._version, value.clone()) for name, value in traced.state_dict(keep_vars=True).items()}
    saved = saved_tensors_of(Program.of(traced))
    assert saved.reason is None
    batch = saved.of(saved.program.node("batch"))
    assert sorted(memory.bytes or 0 for memory in batch.mutates) == [8, 24, 24]
    for name, value in traced.state_dict(keep_vars=True).items():
        assert (value._version, value.grad_fn) == (before[name][0], None)
        assert torch.equal(value, before[name][1])
    x = _input(needs_gradients=False)
    assert bytes_in(saved.memory()) == bytes_really_held(traced, lambda: traced(x))


def test_programs_without_traced_inputs_have_a_reason() -> None:
    saved = saved_tensors_of(Program.of(GraphModule(nn.Module(), Tracer().trace(lambda x: x.sin()))))
    assert saved.reason == "input 'x' has no traced value"
    assert saved.memory() == frozenset()


def test_unknown_code_is_not_run() -> None:
    calls = []

    def act(x: Tensor) -> Tensor:
        calls.append(x)
        return x.sin()

    program = _called_on_traced_input(act)
    saved = saved_tensors_of(program)
    assert saved.reason == "node 'act' runs unknown code, which may have side effects in a dry run"
    assert not calls
    # Taken at the user's word it is run, and only once.
    assert _saves(saved_tensors_of(Program.of(program, pure=[act]))) == {"act": [("input x", 96)]}
    assert len(calls) == 1


def test_an_operator_that_fails_without_data_gives_a_reason() -> None:
    def picky(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        raise ZeroDivisionError("no data\nno result")

    program = _called_on_traced_input(picky)
    assert saved_tensors_of(Program.of(program, pure=[picky])).reason == "node 'picky': ZeroDivisionError: no data"
    assert torch.is_grad_enabled()


def test_a_block_that_fails_halfway_leaves_nothing_switched() -> None:
    def picky(x: Tensor) -> Tensor:
        raise ZeroDivisionError("no data")

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode() as mode:
        x.meta["val"] = mode.from_tensor(_input())
    outer = graph.call_function(toggles.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, True))
    inner = graph.call_function(toggles.ENTER_INFERENCE, (True,))
    called = graph.call_function(picky, (x,))
    graph.call_function(toggles.EXIT_INFERENCE, (inner,))
    graph.call_function(toggles.EXIT_AUTOCAST, (outer,))
    graph.output(called)
    program, before = Program.of(GraphModule(nn.Module(), graph), pure=[picky]), read_ambient()
    assert "ZeroDivisionError" in str(saved_tensors_of(program).reason)
    assert read_ambient() == before
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.sin(_input()).requires_grad


def test_what_a_compiler_saves_is_for_the_compiler_to_say() -> None:
    program = capture(lambda x: x.sin().exp(), (_input(),))
    lowered = plan(program, ByLabel(lambda node: "all"), Lower(Eager())).apply()
    assert "is decided by its compiler" in str(saved_tensors_of(lowered).reason)


def test_a_run_that_goes_another_way_than_the_trace_gives_a_reason() -> None:
    program = capture(Casting(), (_input(),))
    node = next(node for node in program.operators() if "linear" in node.name)
    node.meta["val"] = node.meta["val"].to(torch.float16)
    reason = saved_tensors_of(program).reason
    divergence = "it returns torch.bfloat16 here, but was traced as torch.float16"
    assert str(reason).startswith(f"node {node.name!r}: TypeError: {divergence}; ")


def _called_on_traced_input(function: Callable[[Tensor], Tensor]) -> Program:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode() as mode:
        x.meta["val"] = mode.from_tensor(_input())
    graph.output(graph.call_function(function, (x,)))
    return Program.of(GraphModule(nn.Module(), graph))


@pytest.mark.parametrize(
    "around",
    [
        nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        FakeTensorMode,
        lambda: saved_tensors_hooks(lambda tensor: 1 / 0, lambda packed: packed),
    ],
    ids=["plain", "no_grad", "inference", "autocast", "fake", "hooks"],
)
def test_the_modes_and_hooks_around_make_no_difference(around: Callable[[], AbstractContextManager[Any]]) -> None:
    program = capture(Mixer(), (_input(),))
    expected = _saves(saved_tensors_of(program))
    with around():
        assert _saves(saved_tensors_of(program)) == expected


def test_under_hooks_that_are_switched_off_nothing_is_known() -> None:
    program = capture(Mixer(), (_input(),))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert "not here" in str(saved_tensors_of(program).reason)
    assert saved_tensors_of(program).reason is None


@pytest.mark.parametrize("seeds", slow_but([range(40), range(40, 120)], range(40)))
@pytest.mark.parametrize("nests", [False, True], ids=["programs", "nests of modes"])
def test_generated_programs_hold_what_was_predicted_and_asking_changes_nothing(nests: bool, seeds: range) -> None:
    known = held = 0
    for seed in seeds:
        case = random_traced_case(seed, nests=nests)
        if "lstm" in str(case.graph_module.graph):
            continue  # The size of its workspace is known to oneDNN alone.
        program = Program.of(case.graph_module)
        looks, ambient, random = str(program.graph), read_ambient(), torch.get_rng_state()
        versions = [value._version for value in case.graph_module.state_dict(keep_vars=True).values()]
        saved = saved_tensors_of(program)
        assert (str(program.graph), read_ambient()) == (looks, ambient)
        assert torch.equal(torch.get_rng_state(), random)
        assert versions == [value._version for value in case.graph_module.state_dict(keep_vars=True).values()]
        if saved.reason is not None:
            assert not saved.reason.startswith("node") or "unknown code" in saved.reason, saved.reason
            continue
        own = case.copy()
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            warnings.simplefilter("ignore")
            assert bytes_in(saved.memory()) == bytes_really_held(own.graph_module, own.run), case
        restore_autocast(ambient)
        known, held = known + 1, held + bool(saved.memory())
    assert known > len(seeds) // 4
    assert held > len(seeds) // 24


def test_a_generator_of_the_program_does_not_advance() -> None:
    root = nn.Module()
    root.own = torch.Generator().manual_seed(3)  # type: ignore[assignment]
    graph = torch.fx.Graph()
    draw = graph.call_function(torch.rand, (4, 6), {"generator": graph.get_attr("own")})
    graph.output(draw)
    before = root.own.get_state()  # type: ignore[operator]
    program = Program.of(GraphModule(root, graph))
    assert saved_tensors_of(program).reason is None
    assert torch.equal(before, root.own.get_state())  # type: ignore[operator]


@pytest.mark.parametrize("function", [operator.pow, operator.lshift])
def test_a_number_by_nan_is_no_error_of_the_prediction(function: Callable[..., Any]) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    size = graph.call_method("size", (x, 0))
    size.meta["val"] = 2
    number = graph.call_function(function, (size, float("nan")))
    number.meta["val"] = 1
    graph.output(graph.call_function(torch.mul, (x, number)))
    assert "may have" in (saved_tensors_of(Program(GraphModule({}, graph))).reason or "")
