"""Models to capture: small, and between them full of what makes captured graphs hard to cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Attention", "Buffered", "Casting", "Frozen", "Mixer", "Structured"]


class Mixer(nn.Module):
    """Batch norm, dropout, an in-place activation and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.batch = nn.BatchNorm1d(6)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.25)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.relu(self.batch(self.first(x))))
        return torch.add(x, self.second(hidden))


class Attention(nn.Module):
    """Sizes that are read, computed with and viewed to."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 18)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.size(0)
        query, key, value = self.project(self.norm(x)).chunk(3, dim=-1)
        query, key, value = (part.reshape(rows, 2, 3).transpose(0, 1) for part in (query, key, value))
        mixed = functional.softmax(query @ key.transpose(1, 2), dim=-1) @ value
        return x + mixed.transpose(0, 1).reshape(rows, x.shape[1]), mixed


class Buffered(nn.Module):
    """A buffer that is written, read, and written through a view."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        before = x + self.seen
        with torch.no_grad():
            self.seen.mul_(0.5)
            self.seen[:3].add_(x.detach().mean(0)[:3])
        return before * self.seen.tanh() + torch.rand_like(x)


class Frozen(nn.Module):
    """A block without gradients between two that have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        with torch.no_grad():
            target = self.second(hidden).sin()
        return torch.add(x, self.second(hidden + target))


class Casting(nn.Module):
    """Autocast with a block without gradients inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.first(x)
            with torch.no_grad():
                scale = self.second(x).sigmoid()
            hidden = hidden * scale
        return torch.add(x, hidden.float())


class Structured(nn.Module):
    """A nested input and a nested output, an input that is written and one that is returned."""

    def forward(self, x: Tensor, more: dict[str, list[Tensor]]) -> dict[str, object]:
        first, second = more["parts"]
        view = first.view(-1)
        view.mul_(0.5)
        return {"sum": x + first, "same": second, "pair": (x.sin(), [first[0], None])}
