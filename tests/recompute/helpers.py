"""What the tests of the treatment share: a small network of blocks, captured, and regions recomputed in it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from tests.recompute.operators.helpers import Block, Counted
from torch import Tensor, nn

import partita
from partita import Plan, Program
from partita.policies import ByModule
from partita.treatments import Keep, Recompute

SIZE = 8


class Network(nn.Module):
    """Three blocks with dropout in series; the head's weight is that of the first block."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([Block(SIZE) for _ in range(3)])
            self.head = nn.Linear(SIZE, 2 * SIZE)
        self.head.weight = self.blocks[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def rows(count: int = 4) -> Tensor:
    """An input for the network, the same each time."""
    return torch.linspace(-1, 1, count * SIZE).reshape(count, SIZE).requires_grad_()


def captured() -> Program:
    return partita.capture(Network(), (), {"x": rows().detach()})


def recomputed(keep: Keep, program: Program | None = None) -> Plan:
    """The plan that recomputes each block."""
    return partita.plan(program or captured(), ByModule("blocks.*"), Recompute(keep))


def calls_again(module: nn.Module, x: Tensor) -> Counter[str]:
    """The operators that the backward of a module runs beyond those of the plain network's."""
    torch.manual_seed(0)
    loss, plain = module(x=x), Network()(x)
    with Counted() as found:
        loss.backward()
    with Counted() as expected:
        plain.backward()
    return +(found.calls - expected.calls)


def trained(module: nn.Module, call: Any = None, *, steps: int = 3) -> list[Tensor]:
    """The losses of some steps of gradient descent, then the parameters."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (module if call is None else call)(x=rows().detach())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in module.parameters())]
