"""A captured joint graph gives the bits of eager: results, state and gradients, whatever the model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.program.joint_helpers import Stack, check_joint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import partita
from partita.errors import CaptureError, OptionError
from partita.policies import ByModule
from partita.treatments import Call

X = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(3))


class Normed(nn.Module):
    """Batch norm, dropout and a projection that another block may share."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.drop(functional.gelu(self.up(x)))))


class Everything(nn.Module):
    """Ties, a frozen and an unread parameter, modes, views, state that is mutated, several results of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(2))
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.frozen = nn.Parameter(torch.full((8,), 1.5), requires_grad=False)
        self.unread = nn.Parameter(torch.ones(3))
        self.out = nn.Linear(8, 4)
        self.table = torch.arange(8.0)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> dict[str, Any]:
        given = x
        self.calls.add_(1)
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            total = x.sum()
        with torch.inference_mode():
            mean = x.mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.out(x)
        return {
            "scaled": x * self.frozen * self.table + self.calls,
            "total": total,
            "mean": mean,
            "low": low,
            "row": x[0],
            "given": given,
            "given row": given[1],
            "more": more["y"] * 2,
            "loss": torch.tensor(3.0) * x.sum(),
            "nothing": None,
            "number": 3,
        }


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_joint_graph_computes_what_eager_computes(needs_gradient: bool) -> None:
    torch.manual_seed(0)
    x = X.clone().requires_grad_(needs_gradient)
    program = check_joint(Everything(), (x,), {"more": {"y": torch.randn(3)}})
    assert program.joint is not None
    names = set(program.joint.state)
    assert {"blocks.0.up.weight", "frozen", "unread", "calls", "blocks.1.norm.running_var"} <= names
    assert not {"blocks.1.up.weight", "table"} & names


def test_evaluation_is_captured_as_evaluation() -> None:
    torch.manual_seed(0)
    program = check_joint(Everything().eval(), (X,), {"more": {"y": torch.randn(3)}})
    assert program.joint is not None
    assert [node.meta["desc"].target for node in program.joint.mutated] == ["calls"]


class Views(nn.Module):
    """Results that share memory with one another, with an argument, with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, y: Tensor, factor: int = 2, *, flag: bool = True, name: str = "a") -> tuple[Any, ...]:
        made = self.layer(x)
        return made, made[0], made[1], x.view(-1), self.weight, made * factor, y.t(), made


def test_results_that_share_memory_have_gradients_of_their_own() -> None:
    torch.manual_seed(0)
    x = X.clone().requires_grad_()
    program = check_joint(Views(), (x, torch.randn(2, 2), 3), {"flag": False, "name": "b"})
    assert program.joint is not None
    assert len(program.joint.tangents) == 7


class Tied(nn.Module):
    """One module under two names, one weight in two modules, one buffer under two names that is mutated."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.third = nn.Linear(4, 4)
        self.third.weight = self.first.weight
        self.register_buffer("mean", torch.ones(4))
        self.alias = self.mean

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.alias.mul_(1.5)
        return self.second(self.first(x)) * self.mean + self.third(x), x.sin()


def test_tied_state_is_one_input_whose_gradient_is_the_sum() -> None:
    torch.manual_seed(0)
    program = check_joint(Tied(), (torch.randn(2, 4, requires_grad=True),))
    assert program.joint is not None
    assert program.joint.state == ("first.weight", "first.bias", "third.bias", "mean")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.layer = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(ids)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = checkpoint(self.layer, x, use_reentrant=False)
        query, key = x.chunk(2, -1)
        return (
            (query * key).sum(),
            functional.scaled_dot_product_attention(query, key, key, dropout_p=0.2),
            ids.argmax(),
        )


def test_attention_embeddings_dropout_and_checkpoints() -> None:
    torch.manual_seed(0)
    check_joint(Attention(), (torch.randint(10, (2, 5)),))


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return (a * self.weight * b).sum()


def test_arguments_that_are_mutated_come_back_as_new_values() -> None:
    a, b = torch.randn(3), torch.randn(3)
    model = Overwrites()
    program = partita.capture_joint(model, (a, b))
    joint = program.joint
    assert joint is not None
    assert joint.mutated == (joint.inputs[1],)
    before = a.clone()
    with torch.no_grad():
        new, loss, gradient, *others = program.module()(model.weight, a, b, torch.tensor(1.0))
    assert torch.equal(a, before)
    assert torch.equal(new, 2 * a)
    assert torch.equal(loss, (2 * a * model.weight * b).sum())
    assert torch.equal(gradient, 2 * a * b)
    assert others == [None, None]


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (a * self.weight * b + c).sum()


def test_arguments_that_happen_to_be_one_tensor_stay_apart() -> None:
    model, same = Product(), torch.randn(3)
    program = partita.capture_joint(model, (same, same, model.weight))
    a, b, c = torch.randn(3), torch.randn(3), torch.randn(3)
    with torch.no_grad():
        loss, *gradients = program.module()(model.weight, a, b, c, torch.tensor(1.0))
    assert torch.equal(loss, model(a, b, c))
    assert torch.equal(gradients[0], b * a)
    assert torch.equal(gradients[3], torch.ones(3))


def test_a_function_is_captured_with_the_modules_that_it_uses() -> None:
    layer = nn.Linear(3, 3)

    def loss(x: Tensor) -> Tensor:
        return layer(x).relu().sum()

    joint = partita.capture_joint(loss, (torch.randn(2, 3),)).joint
    assert joint is not None
    assert joint.state == ("layer.weight", "layer.bias")


def test_modes_random_state_and_model_are_left_as_they_were() -> None:
    model = Stack(dropout=0.5)
    before, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu"):
        program = partita.capture_joint(model, (X,))
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    with torch.inference_mode():
        again = partita.capture_joint(model, (X + 0,))
        assert torch.is_inference_mode_enabled()
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(value.grad is None and value.requires_grad for value in model.parameters())
    assert program.graph_module.code == again.graph_module.code == partita.capture_joint(model, (X,)).graph_module.code


def test_blocks_are_found_by_module_in_the_forward_alone() -> None:
    model = Stack()
    program = partita.capture_joint(model, (X,))
    plan = partita.plan(program, ByModule("blocks.*", classes="Block"), Call())
    assert program.joint is not None
    assert [region.label for region in plan.partition] == [f"blocks.{place}" for place in range(4)]
    inside = {node for region in plan.partition for node in region.nodes}
    assert inside <= set(program.joint.forward)
    assert len(inside) == len(program.joint.forward) - 1  # All but the sum.
    inputs = [*(dict(model.named_parameters())[name].detach() for name in program.joint.state), X, torch.tensor(1.0)]
    partita.verify(program, plan.apply(), tuple(inputs))


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.count = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.layer(x) * self.count


def _shared(model: nn.Module) -> partita.Program:
    memory = torch.randn(6)
    return partita.capture_joint(model, (memory[:3], memory[1:4]))


def _twice(model: nn.Module) -> partita.Program:
    tensor = torch.randn(3)
    return partita.capture_joint(model, (tensor, tensor))


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: partita.capture_joint(lambda x: x.sin(), (torch.randn(3),)), "requires gradients"),
        (lambda: partita.capture_joint(nn.Linear(4, 4).requires_grad_(False), (torch.randn(4),)), "requires gradients"),
        (lambda: partita.capture_joint(Hidden(), (torch.randn(2, 4),)), "mutates 'count'.*register it as a buffer"),
        (lambda: _shared(Overwrites()), "share memory"),
        (lambda: _twice(Overwrites()), "share memory"),
        (lambda: partita.capture_joint(Stack(), (torch.randn(4, 5),)), "Stack cannot be captured"),
        (lambda: partita.capture_joint(nn.GRU(4, 4, 2, dropout=0.5), (torch.randn(3, 2, 4),)), "would lose"),
        (lambda: partita.capture_joint(nn.MultiLabelMarginLoss(), _labelled()), "another value when it is traced"),
        (lambda: partita.capture_joint(lambda x, g: x, (X, [torch.Generator()])), "an argument is a torch.Generator"),
    ],
    ids=["function", "frozen", "constant", "overlap", "twice", "shape", "dropout", "loss", "generator"],
)
def test_what_has_no_joint_graph_is_refused(attempt: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        attempt()


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="give \\(x,\\)"):
        partita.capture_joint(Stack(), X)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="captured already"):
        partita.capture_joint(partita.capture_joint(Stack(), (X,)), (X,))  # type: ignore[arg-type]


def _labelled() -> tuple[Tensor, Tensor]:
    return torch.randn(1, 3, requires_grad=True), torch.tensor([[0, -1, 2]])
