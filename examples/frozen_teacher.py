"""Saves a student of a frozen teacher with its mode blocks, and trains what was loaded, and its plain operators.

python examples/frozen_teacher.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn import functional

import partita
from partita.policies import ByMode
from partita.treatments import Mode

WIDTH, CLASSES = 16, 4


class Distillation(nn.Module):
    """The loss of a student against a teacher that must not learn, in mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
        self.student = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = self.teacher(x)
            found = self.student(x)
            with torch.autocast("cpu", enabled=False):
                return functional.mse_loss(found.float(), wanted.float())


def main() -> None:
    torch.manual_seed(0)
    model, x = Distillation(), torch.randn(32, WIDTH)
    program = partita.capture(model, (x,))
    print(partita.mode_tree(program))
    wrapped = partita.plan(program, ByMode(), Mode()).apply()
    print(partita.verify(model, wrapped, (x,)))

    with TemporaryDirectory() as folder:
        file = Path(folder, "distillation.pt2")
        torch.export.save(wrapped.exported(), file)
        loaded = partita.Program.of(file)
        plain = partita.dissolve(partita.Program.of(file))
    print("plain operators:", *dict.fromkeys(str(node.target) for node in plain.operators()))

    # Training the model itself, what was loaded and the plain operators is the same, to the bit.
    losses = [train(module, x) for module in (model, loaded.module(), plain.module())]
    print(f"loss after ten steps: {losses[0]:.6f} in eager mode, {losses[1]:.6f} loaded, {losses[2]:.6f} dissolved")
    assert losses[0] == losses[1] == losses[2]


def train(module: nn.Module, x: Tensor) -> float:
    before = module.get_parameter("teacher.0.weight").detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        loss: Tensor = module(x)
        loss.backward()
        optimizer.step()
    assert torch.equal(module.get_parameter("teacher.0.weight"), before), "the teacher has learned"
    return loss.item()


if __name__ == "__main__":
    main()
