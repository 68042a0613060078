"""Dissolving whole programs: exported, wrapped, with bodies of operators, and those that cannot be dissolved."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.dissolve.helpers import Tracing
from tests.helpers.core import listing, program_of
from tests.helpers.work import calls_during
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import OutputKind
from torch.fx import Graph, GraphModule, Node

from partita import Program, capture, dissolve, fingerprint, inline
from partita._torch import toggles
from partita._torch.modes import read_ambient
from partita.errors import ModeError, OptionError
from partita.rewrite.wrap_modes import wrap_modes

BRAIN = torch.bfloat16
aten = torch.ops.aten


class Model(nn.Module):
    """A frozen half, a trained half, statistics, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.trained, self.tied = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.trained.weight
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("fleeting", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            features = self.frozen(x)
            self.mean.mul_(0.9).add_(0.1 * features.mean(0))
        with torch.autocast("cpu", BRAIN):
            y = self.trained(features - self.mean)
            with torch.no_grad():
                y.mul_(self.fleeting)
            return {"y": y, "z": self.tied(y * 2).float()}


def example() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 4)


def ran(module: nn.Module) -> tuple[Any, ...]:
    outputs = module(example())
    sum(output.float().square().sum() for output in outputs.values()).backward()
    gradients = {name: weight.grad for name, weight in module.named_parameters()}
    return outputs, gradients, dict(module.state_dict())


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_dissolved_program_is_exported_and_loaded() -> None:
    program = dissolve(capture(Model(), (example(),)))
    file = io.BytesIO()
    torch.export.save(program.exported(), file)
    file.seek(0)
    assert_same(torch.export.load(file).module()(example()), Model()(example()))
    assert_same(ran(program.module()), ran(Model()))


def test_a_dissolved_program_shares_the_state_of_the_original() -> None:
    captured = capture(Model(), (example(),))
    found = dissolve(captured)
    assert found.exported().state_dict.keys() == captured.exported().state_dict.keys()
    for name, tensor in found.exported().state_dict.items():
        assert tensor is captured.exported().state_dict[name]


def test_the_signature_names_what_the_graph_returns() -> None:
    exported = dissolve(capture(Model(), (example(),))).exported()
    (output,) = exported.graph.find_nodes(op="output")
    named = [spec.arg.name for spec in exported.graph_signature.output_specs]
    assert named == [node.name for node in output.args[0]]
    assert {spec.kind for spec in exported.graph_signature.output_specs} == {OutputKind.USER_OUTPUT}


def test_a_dissolved_program_is_unflattened() -> None:
    exported = dissolve(capture(Model(), (example(),))).exported()
    assert_same(torch.export.unflatten(exported)(example()), Model()(example()))


def test_a_frozen_weight_stays_frozen_in_core_operators() -> None:
    table = torch.export.default_decompositions()
    table.pop(aten.detach.default)
    exported = dissolve(capture(Model(), (example(),))).exported()
    # Its own decomposition refuses the write into `y`; torch's takes it apart, and `detach` is left.
    module = torch.export.ExportedProgram.run_decompositions(exported, table).module()
    sum(output.float().sum() for output in module(example()).values()).backward()
    assert module.frozen.weight.grad is None
    assert module.trained.weight.grad is not None


def test_wrapped_and_flat_programs_dissolve_alike() -> None:
    captured = capture(Model(), (example(),))
    wrapped = wrap_modes(captured)
    assert fingerprint(dissolve(wrapped)) == fingerprint(dissolve(captured))


def test_operators_of_torch_are_dissolved() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", BRAIN):
                y = self.layer(x)
            with torch.no_grad():
                return y @ self.layer.weight.bfloat16()

    torch.manual_seed(0)
    model = Plain()
    program = Program.of(torch.export.export(model, (example(),)))
    found = dissolve(program)
    assert "wrap_with" in listing(program)
    assert "wrap_with" not in listing(found)
    assert_same(found.module()(example()), model(example()))


def test_a_dissolved_program_dissolves_to_itself() -> None:
    found = dissolve(capture(Model(), (example(),)))
    assert dissolve(found) is found


def test_a_program_without_modes_comes_back_as_it_is() -> None:
    program = program_of(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    assert dissolve(program) is program


def test_the_modes_around_the_call_make_no_difference() -> None:
    captured = capture(Model(), (example(),))
    wanted = listing(dissolve(captured))
    for around in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.float16)):
        with around:
            found = read_ambient()
            assert listing(dissolve(captured)) == wanted
            assert read_ambient() == found


def test_the_program_is_left_as_it_was() -> None:
    captured = capture(Model(), (example(),))
    before = listing(captured), fingerprint(captured)
    state = torch.random.get_rng_state()
    dissolve(captured)
    assert (listing(captured), fingerprint(captured)) == before
    assert torch.equal(torch.random.get_rng_state(), state)


# Bodies -----------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """A branch with a block of its own inside a block, and one without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        def positive(x: Tensor) -> Tensor:
            with torch.no_grad():
                y = x @ self.w
            return y * x

        def negative(x: Tensor) -> Tensor:
            return (x @ self.w).float()

        with torch.autocast("cpu", BRAIN):
            return torch.cond(x.sum() > 0, positive, negative, (x,))


@pytest.mark.parametrize("sign", [1, -1])
def test_branches_are_dissolved_for_the_mode_they_run_under(sign: int) -> None:
    model, x = Branching(), example().abs() * sign
    program = dissolve(capture(Branching(), (x,)))
    bodies = [module for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    assert len(bodies) == 3
    assert all(Program.of(body).modes.by_number is None for body in bodies)
    module = program.module()
    assert_same(module(x), model(x))
    gradients = [torch.autograd.grad(each(x).sum(), each.parameters(), allow_unused=True) for each in (module, model)]
    assert sign == 1 or torch.equal(gradients[0][0], gradients[1][0])
    assert sign == -1 or gradients[0][0] is None or not gradients[0][0].any()


def test_a_body_that_runs_under_two_modes_becomes_two() -> None:
    root = nn.Module()
    root.body = _times_weight()
    graph = Graph()
    a, inner = graph.placeholder("a"), graph.get_attr("body")
    run = torch.ops.higher_order.invoke_subgraph
    plain = graph.call_function(run, (inner, "plain", a))
    graph.call_function(toggles.SET_GRAD, (False,))
    frozen = graph.call_function(run, (inner, "frozen", a))
    graph.call_function(toggles.SET_GRAD, (True,))
    graph.output((plain, frozen))
    for node in (a, plain, frozen):
        node.meta["val"] = torch.empty(4, 4)
    found = dissolve(Program.of(GraphModule(root, graph)))
    targets = [str(node.target) for node in found.graph.find_nodes(op="get_attr")]
    assert targets == ["body", "body_1"]
    assert [listing(found.graph_module.get_submodule(target)).count("detach.default") for target in targets] == [0, 1]
    assert found.graph_module.body is root.body


def _times_weight() -> GraphModule:
    root, graph = nn.Module(), Graph()
    root.w = nn.Parameter(torch.randn(4, 4))
    graph.output((graph.call_function(aten.mm.default, (graph.placeholder("a"), graph.get_attr("w"))),))
    module = GraphModule(root, graph)
    Tracing(module, (torch.randn(4, 4),)).seen()
    return module


# Long programs ----------------------------------------------------------------------------------------------------


class Chains:
    """A graph of long chains of operators, traced to one value."""

    def __init__(self) -> None:
        self.graph = Graph()
        with FakeTensorMode():
            self.value = torch.empty(4)
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = self.value

    def chain(self, target: Any, operands: Sequence[tuple[Any, ...]]) -> Node:
        last = self.x
        for operand in operands:
            last = self.graph.call_function(target, (last, *operand))
            last.meta["val"] = self.value
        return last

    def done(self, *outputs: Node) -> Program:
        self.graph.output(outputs)
        return program_of(self.graph)


def beside_carriers(length: int) -> Program:
    chains = Chains()
    carrying = chains.chain(aten.sin.default, [()] * length)
    asked = chains.graph.call_function(toggles.IS_GRAD_ENABLED)
    chains.graph.call_function(toggles.SET_GRAD, (False,))
    without = chains.chain(aten.cos.default, [()] * length)
    chains.graph.call_function(toggles.SET_GRAD, (asked,))
    return chains.done(carrying, without)


def test_the_cost_of_no_grad_grows_with_the_program_and_no_faster() -> None:
    small, large = beside_carriers(500), beside_carriers(4_000)
    assert calls_during(dissolve, large) < 10 * calls_during(dissolve, small)  # Eight times the nodes.


def test_a_tensor_may_be_written_any_number_of_times_under_autocast() -> None:
    chains, numbers = Chains(), range(1_200)
    entered = chains.graph.call_function(toggles.ENTER_AUTOCAST, ("cpu", BRAIN, True, None))
    last = chains.chain(aten.add_.Tensor, [(float(number),) for number in numbers])
    chains.graph.call_function(toggles.EXIT_AUTOCAST, (entered,))
    found = dissolve(chains.done(last))
    assert found.modes.by_number is None
    assert_same(found.module()(torch.zeros(4)), (torch.full((4,), float(sum(numbers))),))


# What cannot be dissolved -----------------------------------------------------------------------------------------


def test_a_program_without_traced_values_is_refused() -> None:
    graph = Graph()
    a = graph.placeholder("a")
    graph.call_function(toggles.SET_GRAD, (False,))
    b = graph.call_function(torch.mul, (a, 2))
    graph.call_function(toggles.SET_GRAD, (True,))
    graph.output(b)
    with pytest.raises(OptionError, match=r"'a' has no traced value.*partita\.capture"):
        dissolve(program_of(graph))


def test_a_module_called_under_no_grad_is_refused() -> None:
    root = nn.Module()
    root.layer = nn.Linear(4, 4)
    graph = Graph()
    a = graph.placeholder("a")
    graph.call_function(toggles.SET_GRAD, (False,))
    b = graph.call_module("layer", (a,))
    graph.call_function(toggles.SET_GRAD, (True,))
    graph.output(b)
    module = GraphModule(root, graph)
    Tracing(module, (example(),)).seen()
    with pytest.raises(OptionError, match=r"'layer' calls the module 'layer'"):
        dissolve(Program.of(module))


def test_a_program_that_leaves_a_mode_behind_is_refused() -> None:
    graph = Graph()
    a = graph.placeholder("a")
    graph.call_function(toggles.SET_GRAD, (False,))
    graph.output(graph.call_function(torch.mul, (a, 2)))
    with pytest.raises(ModeError, match="leaves no_grad behind"):
        dissolve(program_of(graph))


def test_another_shape_in_place_is_refused_where_gradients_are_lost() -> None:
    graph = Graph()
    b = graph.call_function(torch.mul, (graph.placeholder("a"), 2))
    graph.call_function(toggles.SET_GRAD, (False,))
    c = graph.call_function(aten.t_.default, (b,))
    graph.call_function(toggles.SET_GRAD, (True,))
    graph.output(c)
    module = GraphModule(nn.Module(), graph)
    Tracing(module, (example(),)).seen()
    with pytest.raises(ModeError, match="'t__default' changes the shape"):
        dissolve(Program.of(module))


def test_an_operator_that_was_traced_without_its_autocast_is_refused() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", BRAIN):
                return self.lstm(x)[0]

    program = inline(Program.of(torch.export.export(Recurrent(), (torch.randn(2, 3, 4),))))
    with pytest.raises(ModeError, match=r"'lstm' returns torch\.bfloat16"):
        dissolve(program)
