"""Small models that the tests of memory budgets share, and rates that do not depend on the machine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partita.memory import Rates

#: Fixed, so that plans do not depend on the machine.
RATES = Rates(matmul_flops=1e11, attention_flops=1e11, bytes=1e10, call=5e-6)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x), y)


class CrossAttention(nn.Module):
    """Blocks that read their own input, and all of them the results of two others; parts are cut in odd places."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, width)
        self.bias = nn.Linear(width, width)
        self.queries = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.keys = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = torch.tanh(self.encoder(x))
        bias = self.bias(y.unsqueeze(1) * x)
        for query, key, out in zip(self.queries, self.keys, self.outs, strict=True):
            scale = x.pow(2).mean(-1, keepdim=True).rsqrt()
            scores = torch.softmax(query(x * scale) * key(seen).relu() + bias, -1)
            x = x + out(scores * seen)
        return x.square().mean()
