"""The model of the examples: a small decoder, built in code."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, HEADS = 64, 32, 4


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3 * HEADS, width // HEADS).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def some_ids(rows: int = 2) -> Tensor:
    return torch.randint(WORDS, (rows, 8))
