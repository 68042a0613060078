"""Backends that want parameters and buffers as constants: what they get, and what happens when a constant changes."""

from __future__ import annotations

import copy
import pickle
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace
from transformers import BertConfig, BertModel

import partita
from partita import Program
from partita.policies import ByCapability, ByModule
from partita.treatments import Lower

COMPILED: list[tuple[dict[str, Tensor], int]] = []


@dataclass(frozen=True)
class Folding:
    """Copies the constants when it compiles, as a backend does that folds them."""

    name: ClassVar[str] = "folding"
    wants_constants: ClassVar[bool] = True

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        COMPILED.append((dict(body.named_buffers()), len(inputs)))
        return copy.deepcopy(body)

    def save(self, compiled: GraphModule) -> bytes:
        return pickle.dumps(compiled)

    def load(self, data: bytes) -> Any:
        return pickle.loads(data)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.first(x) * self.scale) + self.calls


X = torch.randn(3, 4)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    COMPILED.clear()


def lowered(program: Program, policy: Any = None) -> nn.Module:
    return partita.plan(program, policy or ByCapability(Folding()), Lower(Folding(), strict=True)).apply().module()


@torch.no_grad()
def test_the_body_holds_parameters_and_buffers_and_the_function_takes_the_others() -> None:
    model = Net()
    expected = copy.deepcopy(model)(X)
    assert torch.equal(lowered(partita.capture(model, (X,)))(X), expected)
    ((held, inputs),) = COMPILED
    assert sorted(map(tuple, (value.shape for value in held.values()))) == [(4,), (4,), (4,), (4, 4), (4, 4)]
    assert inputs == 2  # The program mutates the buffer `calls`.
    assert not any(value.requires_grad for value in held.values())


@pytest.mark.parametrize("change", ["in place", "load_state_dict", "another tensor", "its data"])
@torch.no_grad()
def test_a_constant_that_has_changed_is_compiled_in_anew(change: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module = lowered(partita.capture(model, (X,)))
    first = module(X)
    weight = module.get_parameter("0.weight")
    if change == "in place":
        weight.mul_(2)
    elif change == "load_state_dict":
        module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})
    elif change == "another tensor":
        module.get_submodule("0").weight = nn.Parameter(weight * 2)
    else:
        weight.data = weight * 2
    state = {name.removeprefix("0."): value for name, value in module.state_dict().items()}
    expected = torch.func.functional_call(nn.Linear(4, 4), state, (X,)).relu()
    assert torch.equal(module(X), expected)
    assert not torch.equal(expected, first)
    assert len(COMPILED) == 2
    assert torch.equal(module(X), expected)
    assert len(COMPILED) == 2


def test_training_runs_eagerly_and_says_so() -> None:
    model = nn.Linear(4, 4)
    plan = partita.plan(partita.capture(model, (X,)), ByCapability(Folding()), Lower(Folding()))
    plan.apply().module()(X).sum().backward()
    assert model.weight.grad is not None
    assert not COMPILED
    assert "gradients are needed, which it does not give" in str(plan.failures)


@torch.no_grad()
def test_equal_layers_have_constants_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module = lowered(partita.capture(model, (X,)), ByModule("*"))
    assert torch.equal(module(X), model(X))
    assert len(COMPILED) == 2


@torch.no_grad()
def test_a_copy_is_compiled_for_its_own_weights() -> None:
    module = lowered(partita.capture(nn.Linear(4, 4), (X,)))
    first = module(X)
    copied = copy.deepcopy(module)
    copied.get_parameter("weight").zero_()
    assert torch.equal(copied(X), copied.get_parameter("bias").expand(3, 4))
    assert torch.equal(module(X), first)


@torch.no_grad()
def test_a_stored_function_serves_the_same_weights_only() -> None:
    module = lowered(partita.capture(nn.Linear(4, 4), (X,)))
    first, data = module(X), pickle.dumps(module)
    loaded = pickle.loads(data)
    assert torch.equal(loaded(X), first)
    assert len(COMPILED) == 1
    changed = pickle.loads(data)
    changed.get_parameter("weight").zero_()
    assert torch.equal(changed(X), changed.get_parameter("bias").expand(3, 4))
    assert len(COMPILED) == 2


@torch.no_grad()
def test_parameters_of_called_modules_are_constants() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    assert torch.equal(lowered(Program.of(symbolic_trace(model)))(X), model(X))
    ((held, inputs),) = COMPILED
    assert (len(held), inputs) == (2, 1)


@torch.no_grad()
def test_parameters_are_constants_inside_of_torch_compile() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    options = {"policy": ByCapability(Folding()), "treatment": Lower(Folding(), strict=True)}
    compiled = torch.compile(model, backend="partita", options=options)
    assert torch.equal(compiled(X), model(X))
    assert [(len(held), inputs) for held, inputs in COMPILED] == [(2, 1)]
    model[0].weight.mul_(2)
    assert torch.equal(compiled(X), model(X))


@pytest.fixture(scope="module")
def onnx_runtime() -> Any:
    pytest.importorskip("onnxruntime")
    examples = str(Path(__file__).resolve().parents[2] / "examples")
    sys.path.insert(0, examples)
    try:
        return runpy.run_path(f"{examples}/onnxruntime_backend.py")["OnnxRuntime"]()
    finally:
        sys.path.remove(examples)
        sys.modules.pop("model", None)


def _cnn() -> tuple[nn.Module, tuple[Tensor, ...]]:
    blocks = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)]
    return nn.Sequential(*blocks), (torch.randn(2, 3, 8, 8),)


def _bert() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return BertModel(config), (torch.randint(0, 50, (2, 6)),)


@pytest.mark.parametrize("make", [_cnn, pytest.param(_bert, marks=pytest.mark.slow)])
def test_onnx_runtime_runs_real_models(onnx_runtime: Any, make: Any) -> None:
    torch.manual_seed(0)
    model, arguments = make()
    program = partita.capture(model.eval(), arguments)
    plan = partita.plan(program, ByCapability(onnx_runtime), Lower(onnx_runtime, strict=True))
    with torch.no_grad():
        partita.verify(program, plan.apply(), arguments, gradients=False)
    assert not plan.failures


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_step_is_noticed_although_fused_kernels_raise_no_version(fused: bool) -> None:
    model = nn.Linear(4, 4)
    module = lowered(partita.capture(model, (X,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    for _ in range(2):
        model(X).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(module(X), model(X))


@torch.no_grad()
def test_statistics_that_a_batch_norm_updates_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    module = lowered(partita.capture(model, (X,)))
    first = module(X)
    model.train()(X)
    assert torch.equal(module(X), model.eval()(X))
    assert not torch.equal(module(X), first)


def test_weights_made_in_inference_mode_stay_inputs() -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 4).requires_grad_(False)
        module = lowered(partita.capture(model, (X,)))
        first = module(X)
        model.weight.mul_(2)
        assert torch.equal(module(X), model(X))
        assert not torch.equal(module(X), first)


@torch.no_grad()
def test_tensors_that_were_compiled_in_can_be_swapped() -> None:
    model = nn.Linear(4, 4)
    module = lowered(Program.of(symbolic_trace(nn.Sequential(model))))
    module(X)
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.zeros(4, 4)))
    assert torch.equal(module(X), model.bias.expand(3, 4))
