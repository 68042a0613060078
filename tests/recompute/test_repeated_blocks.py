"""A repeated block that is recomputed is compiled once, through capture and inside torch.compile."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from tests.lowering.helpers import Counting
from tests.torch_compile.helpers import Recorder, assert_trains_like_eager, compiled
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import partita
from partita.policies import Repeats
from partita.treatments import Call, Lower, Recompute


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch.compiler.reset()


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return result


class _Model(nn.Module):
    def __init__(self, *, tied: bool = False, autocast: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(_Block() for _ in range(6))
        self.autocast, self.checkpointed = autocast, checkpointed
        for block in self.blocks if tied else ():
            block.up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            x = self.first(x).float()
            for block in self.blocks:
                made = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
                x = made
        return x


MODELS: list[dict[str, bool]] = [{}, {"tied": True}, {"autocast": True}]
#: Blocks of five operators, three of those before the first one.
REPEATS = Repeats(min_size=5)


@pytest.mark.parametrize(
    ("settings", "is_cut"),
    slow_but(product(MODELS, (True, False)), *((settings, bool(settings)) for settings in MODELS), ({}, True)),
)
def test_captured_blocks_are_compiled_once(settings: dict[str, bool], is_cut: bool) -> None:
    model, args = _Model(**settings), (torch.linspace(-1, 1, 24).reshape(4, 6),)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = partita.capture(model, args, dynamic_shapes=({0: rows},))
    recomputed = partita.plan(program, REPEATS, lambda region: Recompute() if "repeat" in region.name else Call())
    backend = Counting()
    plan = partita.plan(recomputed.apply() if is_cut else recomputed.annotate(), REPEATS, Lower(backend))
    after = plan.apply()
    partita.verify(model, after, args, tolerance=partita.Tolerance(rounding=1e-2 if settings.get("autocast") else 1e-6))
    repeated = [body for body in plan.bodies() if body.calls >= 5]
    assert len(repeated) == 1
    made = [one.gradients for one in plan.compilations if one.region in repeated[0].regions and one.is_new]
    assert made == [True, False]
    assert not plan.failures


@pytest.mark.parametrize("settings", MODELS, ids=lambda settings: next(iter(settings), "plain"))
def test_blocks_inside_torch_compile_are_compiled_once(settings: dict[str, bool]) -> None:
    inner = Recorder()
    call = compiled(_Model(**settings), policy=REPEATS, treatment=Recompute(), inner=inner, share=True)
    call(torch.ones(4, 6)).sum().backward()
    assert len(inner.parts) < 4
    marks = [node.meta.get("recompute") for part in inner.parts for node in part.graph.nodes]
    assert any(mark is not None for mark in marks)


def test_checkpointed_blocks_inside_torch_compile_are_compiled_once() -> None:
    inner = Recorder()
    compiled(_Model(checkpointed=True), policy=REPEATS, inner=inner, share=True)(torch.ones(4, 6)).sum().backward()
    assert len(inner.parts) < 4


@pytest.mark.parametrize("options", [{"treatment": Recompute()}, {}], ids=["recomputed", "checkpointed"])
def test_recomputed_blocks_train_as_in_eager_mode(options: dict[str, Any]) -> None:
    model = _Model(checkpointed=not options)
    assert_trains_like_eager(model, policy=REPEATS, inner="aot_eager", share=True, **options)


def test_a_graph_with_operators_outside_of_the_regions_is_compiled_whole() -> None:
    inner = Recorder()
    policy = Repeats(min_size=5, between=False)
    compiled(_Model(), policy=policy, treatment=Recompute(), inner=inner, share=True)(torch.ones(4, 6))
    assert len(inner.parts) == 1
