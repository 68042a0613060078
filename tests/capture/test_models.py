"""What can be captured: functions, checkpoints, training, hidden state, dynamic shapes, what was captured before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.helpers import Model, all_same, assert_like_eager, captured, outcome, same
from tests.helpers.processes import run_in_new_process
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from partita import fingerprint
from partita.capture.capture import capture

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
LAYER = nn.Linear(4, 4)


def through_a_layer(x: Tensor, *, scale: float = 1.0) -> Tensor:
    with torch.no_grad():
        fixed = LAYER(x)
    return fixed * LAYER(x) * scale


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @torch.no_grad()
    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale


def test_a_function_is_captured_with_the_layers_that_it_uses() -> None:
    program = capture(through_a_layer, (X,), {"scale": 3.0}).module()
    assert {*dict(program.named_parameters())} == {"LAYER.weight", "LAYER.bias"}
    assert same(program(X, scale=3.0), through_a_layer(X, scale=3.0))
    found = torch.autograd.grad(program(X, scale=3.0).sum(), LAYER.weight)
    assert same(found[0], torch.autograd.grad(through_a_layer(X, scale=3.0).sum(), LAYER.weight)[0])


def test_a_method_is_captured_with_its_owner() -> None:
    encoder = Encoder()
    for method in (encoder.encode, partial(encoder.encode, scale=2.0), lambda x: encoder.encode(x, 3.0)):
        program = capture(method, (X,)).module()
        assert len(list(program.parameters())) == 2
        assert same(program(X), method(X))
        assert not program(X).requires_grad


def test_keyword_arguments_and_nested_outputs_are_kept() -> None:
    def does(model: Model, x: Tensor, *, pair: tuple[Tensor, Tensor], flag: bool) -> dict[str, Any]:
        with torch.no_grad():
            fixed = model.second(pair[0]) if flag else pair[1]
        return {"sum": model.first(x) + fixed, "rest": [pair[1], 3]}

    kwargs = {"pair": (X + 1, X + 2), "flag": True}
    program = assert_like_eager(Model(does), (X,), kwargs)
    assert {*program.module()(X, **kwargs)} == {"sum", "rest"}


def test_dynamic_shapes_are_kept() -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            scale = model.second(x).sum(0) / x.shape[0]
        return model.first(x) * scale

    model = Model(does)
    program = capture(model, (X,), dynamic_shapes={"x": {0: Dim.DYNAMIC}}).module()
    for rows in (2, 3, 17):
        x = torch.randn(rows, 4)
        assert outcome(model, (x,)).equals(outcome(program, (x,)))


class Trained(nn.Module):
    """Normalisation that counts, dropout, and a parametrization that updates vectors under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.drop(self.norm(x)))


@pytest.mark.parametrize("training", [True, False])
def test_training_and_evaluation_are_kept(training: bool) -> None:
    assert_like_eager(Trained().train(training), (X,))


def test_steps_of_training_are_those_of_the_model() -> None:
    model = Trained()
    program = captured(model, (X,)).module()
    for module in (model, program):
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            module(X).square().sum().backward()
            optimizer.step()
    assert all_same(model.state_dict(), {name: program.state_dict()[name] for name in model.state_dict()})


def _half(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = model.second(x)
    return torch.dropout(model.second(x).relu(), 0.5, train=True) * scale


def test_modules_of_a_function_may_be_called_like_attributes_of_modules() -> None:
    function, graph, training = (nn.Linear(4, 4) for _ in range(3))
    for call in (lambda x: graph(function(x)) * training(x), partial(function), partial(graph, input=X)):
        args = () if isinstance(call, partial) and call.keywords else (X,)
        assert torch.equal(capture(call, args).module()(*args), call(*args))


KEPT = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


@pytest.mark.parametrize(
    "call",
    [
        partial(checkpoint, use_reentrant=False),
        partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
        partial(checkpoint, use_reentrant=False, context_fn=KEPT),
        partial(checkpoint, use_reentrant=True),
    ],
    ids=["plain", "without random state", "selective", "reentrant"],
)
def test_checkpointed_calls_have_the_values_and_gradients_of_the_model(call: Callable[..., Any]) -> None:
    def plain(model: Model, x: Tensor) -> Tensor:
        return _half(model, model.first(x))

    def checkpointed(model: Model, x: Tensor) -> Tensor:
        return call(partial(_half, model), model.first(x))

    program = captured(Model(checkpointed), (X,))
    assert outcome(Model(plain), (X,)).equals(outcome(program.module(), (X,)))
    assert outcome(Model(plain), (X,), caller=torch.no_grad).equals(
        outcome(program.module(), (X,), caller=torch.no_grad)
    )


def test_a_checkpointed_sequence_can_be_captured() -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        return checkpoint_sequential([model.first, torch.relu, model.second, torch.sin], 2, x, use_reentrant=False)

    assert_like_eager(Model(does), (X,))


def test_a_context_of_a_checkpoint_that_is_a_block_is_kept() -> None:
    def blocks() -> tuple[Any, Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16)

    def does(model: Model, x: Tensor) -> Tensor:
        return checkpoint(model.second, model.first(x), use_reentrant=False, context_fn=blocks)

    assert captured(Model(does), (X,)).module()(X).dtype is torch.bfloat16


def test_tensors_that_the_trace_writes_to_are_as_before() -> None:
    outside = torch.zeros(4)

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.zeros(4)

        def forward(self, x: Tensor) -> Tensor:
            self.plain.add_(1)
            outside.add_(2)
            return x + self.plain + outside

    model = Counting()
    program = capture(model, (X,)).module()
    assert not model.plain.any()
    assert not outside.any()
    assert same(program(X), X + 1 + 2)
    assert same(program(X), X + 2 + 4)


def test_arguments_made_in_inference_mode_are_taken() -> None:
    model = Model(lambda model, x: model.first(x))
    with torch.inference_mode():
        program = capture(model, (X + 0,)).module()
    assert program(X).requires_grad


def test_buffer_updates_survive_dead_code_elimination() -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.total.copy_(x.sum(0))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model.total.mul_(2)
        return model.first(x)

    program = captured(Model(does), (X,)).module()
    program.graph.eliminate_dead_code()
    program.recompile()
    program(X)
    assert same(program.total, 2 * X.sum(0))


def _mixed(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = model.second(x)
        with torch.enable_grad(), torch.autocast("cpu"):
            scale = model.second(scale)
        model.total.add_(1)
    with torch.inference_mode():
        model.total.add_(1)
    return model.first(x) * scale


def test_what_was_captured_can_be_captured_again() -> None:
    program = captured(Model(_mixed), (X,))
    again = capture(program.module(), (X,))
    assert fingerprint(again) == fingerprint(program)


def test_a_graph_with_toggles_can_be_captured() -> None:
    program = captured(Model(_mixed), (X,))
    flat = copy.deepcopy(program.graph_module)
    values = [X if node.name == "x" else program.module().state_dict()[_attribute(node.name)] for node in _inputs(flat)]
    assert any("is_grad_enabled" in node.name for node in flat.graph.nodes)
    again = capture(flat, tuple(values))
    wanted = [str(program.modes.at(program.index.number[node])) for node in program.operators()]
    assert [str(again.modes.at(again.index.number[node])) for node in again.operators()] == wanted


def _inputs(module: Any) -> list[Any]:
    return module.graph.find_nodes(op="placeholder")


def _attribute(name: str) -> str:
    return name.removeprefix("p_").removeprefix("b_").replace("_", ".", name.count("_") - 1)


_LOADS = """
import sys
import partita
import torch

x, expected, gradient, total = torch.load(sys.argv[2])
module = torch.export.load(sys.argv[1]).module()
found = module(x)
assert torch.equal(found, expected), (found, expected)
found.float().square().sum().backward()
assert torch.equal(dict(module.named_parameters())["first.weight"].grad, gradient)
assert dict(module.named_parameters())["second.weight"].grad is not None
assert torch.equal(module.total, total)
"""


def test_a_saved_program_runs_in_another_process(tmp_path: Path) -> None:
    model = Model(_mixed)
    torch.export.save(captured(model, (X,)).exported(), tmp_path / "model.pt2")
    expected = outcome(model, (X,))
    torch.save((X, expected.outputs[0].detach(), expected.gradients["first.weight"], model.total), tmp_path / "data.pt")
    finished = run_in_new_process(_LOADS, tmp_path / "model.pt2", tmp_path / "data.pt")
    assert finished.returncode == 0, finished.stderr
