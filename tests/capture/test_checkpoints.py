"""Captured calls of `torch.utils.checkpoint`: annotated, with a warning, recomputed by a plan. And sharded models."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import partita
from partita.errors import CaptureError
from partita.policies import ByAnnotation
from partita.treatments import Recompute


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.dropout(self.down(torch.relu(self.up(x))), 0.5, True)


def _selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


OPTIONS: list[dict[str, Any]] = [
    {"use_reentrant": False},
    {"use_reentrant": True},
    {"use_reentrant": False, "context_fn": _selective},
]


class _Model(nn.Module):
    def __init__(self, options: dict[str, Any], *, nested: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.options, self.nested = options, nested

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(
                self._inner if self.nested else block, *((block, x) if self.nested else (x,)), **self.options
            )
        return x.sum()

    def _inner(self, block: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(block, x, use_reentrant=False)
        return found.sin()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_same_calls_are_recomputed_by_their_annotation(options: Any, nested: bool) -> None:
    model, x = _Model(options, nested=nested), torch.randn(4, 8, requires_grad=True)
    program = partita.capture(model, (x,))
    decided = partita.plan(program, ByAnnotation("checkpoint"), Recompute())
    assert [region.label for region in decided.partition] == [1, 2, 3]
    partita.verify(model, decided.apply(), (x,))
    saved = decided.saved_memory()
    assert saved is not None
    assert decided.excluded()[0].count == 1  # The sum.


def test_a_warning_says_what_became_of_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "partita"):
        partita.capture(_Model(OPTIONS[0]), (torch.randn(4, 8),))
        assert any("calls torch.utils.checkpoint (3 times)" in message for message in caplog.messages)
        caplog.clear()
        partita.capture(_Block(), (torch.randn(4, 8),))
        assert not caplog.messages


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
def test_a_sharded_model_is_refused_in_words(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        fully_shard(model)
        with pytest.raises(CaptureError, match=r"0\.weight is a DTensor.*capture it before it is sharded"):
            partita.capture(model, (torch.randn(2, 8),))
    finally:
        dist.destroy_process_group()
