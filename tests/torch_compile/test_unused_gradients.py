"""Backwards that use nothing of what a compiled region returned: no gradients, and zeros for hooks, in every step."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.torch_compile.helpers import compiled
from torch import Tensor, nn

from partita.policies import Repeats


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.cos(torch.sin(self.up(x)))))


class TwoResults(nn.Module):
    """The second result depends on no block."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x * self.scale, self.scale * 2


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("together", [True, False])
def test_a_loss_that_uses_no_block_leaves_its_parameters_without_gradients_in_the_first_step_too(
    blocks: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not together:
        monkeypatch.setattr("partita.torch_compile.trained_runs._LONGEST", 1)
    model = TwoResults(blocks)
    twin, call = copy.deepcopy(model), compiled(model, inner="aot_eager", policy=Repeats(min_size=1, min_saved=0.0))
    for _ in range(3):
        x, y = torch.randn(3, 6).requires_grad_(), torch.randn(3, 6).requires_grad_()
        call(x)[1].sum().backward()
        twin(y)[1].sum().backward()
        assert x.grad is None
        assert [one.grad is None for one in model.parameters()] == [one.grad is None for one in twin.parameters()]


def test_hooks_get_zeros_where_nothing_of_a_result_is_used() -> None:
    model = TwoResults(4)
    call, seen = compiled(model, inner="aot_eager", policy=Repeats(min_size=1, min_saved=0.0)), list[Tensor]()

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient * 2

    for name in ("blocks.0.up.weight", "blocks.3.down.bias"):
        model.get_parameter(name).register_hook(double)
    for step in range(1, 4):
        x = torch.randn(3, 6).requires_grad_() * 1
        x.register_hook(double)
        call(x)[1].sum().backward()
        assert len(seen) == 3 * step
        assert not any(map(torch.any, seen))
    assert model.get_parameter("blocks.1.up.weight").grad is None


def test_gradients_that_are_used_reach_hooks_as_they_are() -> None:
    model = TwoResults(3)
    twin, call = copy.deepcopy(model), compiled(model, inner="aot_eager", policy=Repeats(min_size=1, min_saved=0.0))
    for one in (model, twin):
        one.get_parameter("blocks.1.up.weight").register_hook(lambda gradient: gradient * 2)
    for used in (1, 0, 1, 0):
        x = torch.randn(3, 6)
        call(x)[used].square().sum().backward()
        twin(x)[used].square().sum().backward()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.parametrize("blocks", [1, 4])
def test_hooks_before_a_compiled_model_get_zeros_where_nothing_of_it_is_used(blocks: int) -> None:
    model, first = TwoResults(blocks), nn.Linear(6, 6)
    before = nn.Sequential(first, nn.Tanh(), nn.Linear(6, 6))
    first.weight.register_hook(lambda gradient: gradient * 2)
    call = compiled(model, inner="aot_eager", policy=Repeats(min_size=1, min_saved=0.0))
    for _ in range(3):
        call(before(torch.randn(3, 6)))[1].sum().backward()
    assert first.weight.grad is not None
    assert not first.weight.grad.any()
    assert all(parameter.grad is None for parameter in model.blocks.parameters())
