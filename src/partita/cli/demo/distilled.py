"""The model of the chapter on modes: a student that learns from a frozen teacher, in mixed precision."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, CLASSES = 32, 10


class Distilled(nn.Module):
    """Three blocks in a block: the teacher has no gradients, and its features are scaled in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH)
        self.student = nn.Linear(WIDTH, CLASSES)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.add_(x.shape[0])
        with torch.autocast("cpu", torch.float16):
            with torch.no_grad():
                features = torch.relu(self.teacher(x))
            with torch.autocast("cpu", enabled=False):
                scale = torch.rsqrt(features.float().square().mean(-1, keepdim=True) + 1e-5)
            logits: torch.Tensor = self.student(features * scale)
        return logits.float()


def seeded() -> tuple[Distilled, tuple[torch.Tensor, ...]]:
    """The model and its arguments, the same in every process."""
    torch.manual_seed(0)
    return Distilled(), (torch.randn(4, WIDTH),)
