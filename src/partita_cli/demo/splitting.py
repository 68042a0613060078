"""Chapter: a transformer is captured, cut at its attention, applied and verified."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional

import partita
from partita.policies import AroundOperators
from partita.treatments import Call

TITLE = "A transformer, cut around its attention"


def show() -> bool:
    """Shows each step and its result; returns whether the cut program equals the original."""
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (2, 16))
    exported = torch.export.export(Decoder().train(), (ids,))
    program = partita.Program.of(exported.module())
    print(f"captured: {program}")

    start = time.perf_counter()
    plan = partita.plan(program, AroundOperators("aten.scaled_dot_product_attention"), Call())
    after = plan.apply()
    print(f"planned and applied in {1e3 * (time.perf_counter() - start):.1f} ms\n\n{plan}\n")
    chosen = next(node.name for node in program.operators() if "dropout" in node.name)
    print(f"plan.explain({chosen!r})\n{plan.explain(chosen)}\n")

    start = time.perf_counter()
    comparison = partita.compare(program, after, (ids,))
    print(f"compared in {time.perf_counter() - start:.1f} s: {comparison}")
    print("values, gradients, dtypes, strides, the mutated buffer, aliasing, RNG state and modes were compared.")
    return comparison.equal


WORDS, WIDTH, HEADS = 97, 32, 4


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        hidden = functional.dropout(functional.gelu(self.up(self.norm2(x))), 0.1, self.training)
        added: torch.Tensor = x + self.down(hidden)
        return added


class Decoder(nn.Module):
    """Token ids in, logits out; counts in a buffer how many tokens it has seen."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.add_(ids.numel())
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
