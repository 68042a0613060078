"""One budget for a step under per-layer FSDP2 and DDP's buckets, in two processes: losses, and measured peaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.processes import run_on_ranks
from tests.torch_compile.test_steps import RATES
from torch import Tensor, nn
from torch.nn import functional

from partita.memory import communication_bytes, measured_peak
from partita.memory.joint.step_plan import StepMemoryPlan

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo"),
    pytest.mark.slow,
]

_DEPTH, _TOKENS = 4, 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        found: Tensor = x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))
        return found


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, width), nn.Embedding(_TOKENS, width)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.tokens(ids) + self.places.weight
        return found


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 50)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return functional.cross_entropy(self.out(x).flatten(0, 1), ids.flatten())


class Transformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = Embedding(width), Head(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(_DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x, ids)
        return loss


def _parallel(kind: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    if kind == "DDP":
        # A bucket has at least a megabyte.
        return nn.parallel.DistributedDataParallel(Transformer(width=160), bucket_cap_mb=2)
    model = Transformer(width=32)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def _trained(model: nn.Module, called: Any, ids: Tensor) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = called(ids)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _process(rank: int, folder: str, kind: str, parts: tuple[float, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        ids = torch.randint(50, (32, _TOKENS), generator=torch.Generator().manual_seed(rank))
        model = _parallel(kind)
        expected = _trained(model, torch.compile(model, backend="aot_eager"), ids)
        for part in parts:
            torch.compiler.reset()
            model, plans = _parallel(kind), list[Any]()
            under: Any = "DDP" if kind == "DDP" else "FSDP2"
            inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
            options = {
                "peak": part,
                "inner": "aot_eager",
                "rates": RATES,
                "communication": communication_bytes(inner, under=under),
                "on_plan": plans.append,
            }
            called = torch.compile(model, backend="partita", options=options)
            assert _trained(model, called, ids) == expected, (kind, part)
            (plan,) = (plan for plan in plans if isinstance(plan, StepMemoryPlan))
            locals_ = [one.to_local() if hasattr(one, "to_local") else one for one in model.parameters()]
            measured = measured_peak(lambda called=called: called(ids).backward(), (*locals_, ids))  # type: ignore[misc]
            assert measured <= plan.allowed_bytes, (kind, part, measured, plan.allowed_bytes)
            assert (plan.seconds == 0) == (part == 1.0)
            if kind == "each layer":
                # Two of the buffers and the gradients' shards are never there together.
                assert 0.93 * plan.peak_bytes < measured, (measured, plan.peak_bytes)
                assert sorted(one.calls for one in plan.parts) == [1, 1, _DEPTH], plan
            else:
                assert len(plan.parts) > 2, plan
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("each layer", (1.0, 0.8, 0.6, 0.5)), ("DDP", (1.0, 0.8))],
)
def test_the_budget_of_a_step_holds_on_each_rank(kind: str, parts: tuple[float, ...], tmp_path: Path) -> None:
    run_on_ranks(_process, str(tmp_path), kind, parts)
