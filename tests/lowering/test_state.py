"""State of modules in a lowered region: loaded, moved, trained, written and replaced as if nothing were compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers.core import program_of
from tests.lowering.helpers import Counting, lowered, plan_of, region_of
from torch import Tensor, nn

from partita import Program, capture, plan, verify
from partita.policies import ByLabel
from partita.treatments import Lower


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5))


def test_state_is_read_anew_in_every_call() -> None:
    backend = Counting()
    model = block().eval()
    module = lowered(model, Lower(backend)).eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(module(x), model(x))
        model[0].weight.add_(1)
        assert torch.equal(module(x), model(x))
        model[0].weight = nn.Parameter(torch.ones(4, 4))
        assert torch.equal(module(x), model(x))
    assert len(backend.made) == 1


def test_a_state_dict_can_be_loaded_under_the_names_of_the_original() -> None:
    program, other = program_of(block()), block()
    decided = plan_of(program, Lower(Counting()))
    after = decided.apply(state_names="original")
    module = after.module().eval()
    x = torch.randn(3, 4)
    module(x)
    module.load_state_dict(other.state_dict())
    assert module.state_dict().keys() == other.state_dict().keys()
    assert torch.equal(module(x), other.eval()(x))
    assert after.original_state().keys() == other.state_dict().keys()


def test_another_dtype_is_another_signature() -> None:
    backend = Counting()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module = lowered(model, Lower(backend))
    x = torch.randn(3, 4)
    module(x)
    module.double()
    assert torch.equal(module(x.double()), model(x.double()))
    assert len(backend.made) == 2


def test_training_and_evaluation_are_distinguished() -> None:
    backend = Counting()
    model = block()
    module = lowered(model, Lower(backend))
    x = torch.randn(3, 4)
    for train in (True, False, True, False):
        module.train(train)
        model.train(train)
        before = copy.deepcopy(model)
        torch.manual_seed(1)
        expected = before(x)
        torch.manual_seed(1)
        assert torch.equal(module(x), expected)
        assert torch.equal(model[1].running_mean, before[1].running_mean)
    assert len(backend.made) == 2


def test_buffers_are_mutated_once() -> None:
    program = program_of(block())
    after = plan_of(program, Lower("aot_eager")).apply()
    verify(program, after, (torch.randn(5, 4),))
    module = after.module()
    counted = next(buffer for name, buffer in module.named_buffers() if name.endswith("num_batches_tracked"))
    for _ in range(3):
        module(torch.randn(5, 4))
    assert counted.item() == 3


def test_a_buffer_of_an_exported_program_is_mutated_once() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    program = capture(Counted(), (torch.ones(3),))
    decided = plan(program, ByLabel(lambda node: "all" if node.op == "call_function" else None), Lower("aot_eager"))
    module = decided.apply().module()
    assert [module(torch.ones(3))[0].item() for _ in range(3)] == [1, 2, 3]
    assert not decided.failures


def test_a_parameter_that_is_frozen_gets_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module = lowered(model, Lower(Counting()))
    module(torch.randn(2, 4)).sum().backward()
    assert model[0].weight.grad is not None
    model.zero_grad()
    model[0].requires_grad_(False)
    module(torch.randn(2, 4)).sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None


def test_a_module_that_takes_the_place_of_another_is_called() -> None:
    backend = Counting()
    module = lowered(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Lower(backend))
    x = torch.randn(2, 4)
    module(x)
    other = nn.Linear(4, 4, bias=False)
    region_of(module).body._modules["_0" if "_0" in region_of(module).body._modules else "0"] = other
    assert torch.equal(module(x), other(x).tanh())


def test_a_module_that_got_a_hook_runs_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, result: result + 1)
    decided = plan_of(Program.of(torch.fx.symbolic_trace(model)), Lower(Counting()))
    x = torch.randn(2, 4)
    assert torch.equal(decided.apply().module()(x), model(x))
    assert "Linear in it runs hooks" in decided.failures[0].reason


@pytest.mark.parametrize(
    "model",
    [
        nn.GRU(4, 4),
        nn.Embedding(6, 4),
        nn.MultiheadAttention(4, 2),
        nn.Sequential(nn.Conv1d(3, 4, 1), nn.GroupNorm(2, 4), nn.Flatten()),
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_modules_of_many_kinds_are_lowered(model: nn.Module) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x)[0] if isinstance(model, nn.MultiheadAttention) else self.inner(x)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return True

    outer = Outer()
    program = Program.of(torch.fx.GraphModule(outer, Tracer().trace(outer)))
    backend = Counting()
    x = torch.arange(6) if isinstance(model, nn.Embedding) else torch.randn(3, 4)
    x = x[None].repeat(2, 1, 1) if isinstance(model, nn.Sequential) else x
    verify(program, plan_of(program, Lower(backend, strict=True)).apply(), (x,))
    assert backend.made


def test_tied_weights_get_one_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    program = program_of(model)
    verify(program, plan_of(program, Lower("aot_eager")).apply(), (torch.randn(3, 4),))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_mutation_of_the_output_of_an_identity_dropout_reaches_its_input(backend: str) -> None:
    """Functionalization takes the two for different memory."""
    dropout = nn.Dropout(0.5).eval()

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = dropout

        def forward(self, x: Tensor) -> Tensor:
            self.dropout(x).add_(1)
            return nn.functional.dropout(x, 0.5, False).mul_(2) + x

    program = program_of(Writes().eval())
    verify(program, plan(program, ByLabel(lambda node: "all"), Lower(backend)).apply(), (torch.ones(3),))
