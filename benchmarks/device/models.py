"""Models of another kind than the decoder: a vision transformer with dropout, and a U-Net of convolutions.

Each returns its loss. No constant of the memory planner was fitted on them. `run` runs every block, by default plainly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Run = Callable[[nn.Module, Tensor], Tensor]


def _plainly(block: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = block(x)
    return found


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.drop(self.out(seen))
        fed: Tensor = x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))
        return fed


class VisionTransformer(nn.Module):
    """A ViT-L/16 at 384 pixels: 24 layers of width 1024, 577 tokens."""

    def __init__(self, run: Run = _plainly, *, width: int = 1024, layers: int = 24) -> None:
        super().__init__()
        self.run = run
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 577, width))
        self.layers = nn.ModuleList(_Layer(width, width // 64, dropout=0.1) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1) + self.places
        for layer in self.layers:
            x = self.run(layer, x)
        return functional.cross_entropy(self.head(self.norm(x[:, 0])).float(), labels)


class _Residual(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, given), nn.GroupNorm(32, made)
        self.conv1, self.conv2 = nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)
        self.skip = nn.Conv2d(given, made, 1) if given != made else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(functional.silu(self.norm1(x)))
        found: Tensor = self.skip(x) + self.conv2(functional.silu(self.norm2(y)))
        return found


class UNet(nn.Module):
    """Residual blocks of convolutions down to an eighth of the size and up again, with connections across."""

    def __init__(self, run: Run = _plainly, *, width: int = 128) -> None:
        super().__init__()
        self.run = run
        widths = [width, 2 * width, 3 * width, 4 * width]
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        pairs = list(zip([width, *widths], widths, strict=False))
        self.down = nn.ModuleList(nn.ModuleList((_Residual(one, two), _Residual(two, two))) for one, two in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(one, one, 3, 2, 1) for one in widths[:-1])
        self.up = nn.ModuleList(
            nn.ModuleList((_Residual(one + two, one), _Residual(one, one)))
            for one, two in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )

    def forward(self, pixels: Tensor, target: Tensor) -> Tensor:
        across: list[Tensor] = []
        x = self.first(pixels)
        for level, pair in enumerate(self.down):
            for block in pair:  # type: ignore[attr-defined]
                x = self.run(block, x)
            if level < len(self.shrink):
                across.append(x)
                x = self.shrink[level](x)
        for pair in self.up:
            x = torch.cat((functional.interpolate(x, scale_factor=2.0), across.pop()), 1)
            for block in pair:  # type: ignore[attr-defined]
                x = self.run(block, x)
        return functional.mse_loss(self.last(x).float(), target.float())


def vision_inputs(batch: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 384, 384, dtype=torch.bfloat16), torch.randint(1000, (batch,))


def image_inputs(batch: int = 8) -> tuple[Tensor, Tensor]:
    pixels = torch.randn(batch, 3, 256, 256, dtype=torch.bfloat16)
    return pixels, torch.randn_like(pixels)
