"""Policies on a Llama, as each tracer records it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import partita
from partita import Program
from partita.policies import AroundOperators, ByModule, BySize, SplitAt
from partita.treatments import Call

pytestmark = pytest.mark.models

IDS = torch.arange(6).reshape(1, 6)
Captured = tuple[GraphModule, tuple[Any, ...]]


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids).logits
        return logits


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        max_position_embeddings=32,
        use_cache=False,
    )
    return Logits(LlamaForCausalLM(config)).eval()


def _exported(*, dynamic: bool) -> Captured:
    shapes = ({1: torch.export.Dim("length", min=2, max=31)},) if dynamic else None
    module = torch.export.export(_llama(), (IDS,), dynamic_shapes=shapes, strict=False).module()
    assert isinstance(module, GraphModule)
    return module, (IDS,)


def _dynamo() -> Captured:
    taken: list[Captured] = []

    def record(graph_module: GraphModule, _: Sequence[Any]) -> Any:
        def run(*args: Any) -> Any:
            taken.append((graph_module, args))
            return graph_module(*args)

        return run

    torch.compiler.reset()
    torch.compile(_llama(), backend=record, fullgraph=True, dynamic=True)(IDS)
    return taken[0]


@pytest.fixture(scope="module", params=["export", "export with symbols", "Dynamo"])
def captured(request: pytest.FixtureRequest) -> Captured:
    return _dynamo() if request.param == "Dynamo" else _exported(dynamic=request.param != "export")


def _same_bits(captured: Captured, plan: partita.Plan) -> bool:
    module, args = captured
    return all(
        torch.equal(before, after)
        for before, after in zip(_flat(module(*args)), _flat(plan.apply().module()(*args)), strict=True)
    )


def _flat(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_attention_stands_alone(captured: Captured) -> None:
    policy = AroundOperators("aten.scaled_dot_product_attention")
    plan = partita.plan(Program.of(captured[0]), policy, Call())
    labels = [region.label for region in plan.partition]
    assert labels == ["between", "chosen", "between", "chosen", "between"]
    assert all(len(region) == 1 for region in plan.partition if region.label == "chosen")
    assert _same_bits(captured, plan)


def test_attention_leads_a_part(captured: Captured) -> None:
    policy = AroundOperators(torch.nn.functional.scaled_dot_product_attention, alone=False)
    plan = partita.plan(Program.of(captured[0]), policy, Call())
    assert len(plan.partition) == 3
    assert _same_bits(captured, plan)


def test_no_region_between_attention_and_projections_is_idle(captured: Captured) -> None:
    policy = AroundOperators(("aten.scaled_dot_product_attention", "aten.linear"))
    plan = partita.plan(Program.of(captured[0]), policy, Call())
    assert sum(region.label == "chosen" for region in plan.partition) == 2 * 8 + 1
    # Norm, rotation, activation, gate and norm in each layer, the last norm, and what comes before all that.
    assert sum(region.label == "between" for region in plan.partition) == 2 * 5 + 1
    assert _same_bits(captured, plan)


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (ByModule("*.layers.*"), ["model_model_layers_0", "model_model_layers_1"]),
        (ByModule(classes="LlamaMLP"), ["model_model_layers_0_mlp", "model_model_layers_1_mlp"]),
        (ByModule(depth=2), ["model_model", "model_lm_head"]),
    ],
)
def test_modules_become_regions(captured: Captured, policy: ByModule, names: list[str]) -> None:
    plan = partita.plan(Program.of(captured[0]), policy, Call())
    assert [region.name for region in plan.partition] == names
    assert _same_bits(captured, plan)


@pytest.mark.parametrize(
    "policy",
    [BySize(parts=4), BySize(operators=20), BySize(parameter_bytes=4096), SplitAt(lambda node: "mul" in node.name)],
    ids=lambda policy: type(policy).__name__,
)
def test_runs_keep_the_bits(captured: Captured, policy: BySize | SplitAt) -> None:
    plan = partita.plan(Program.of(captured[0]), policy, Call())
    assert len(plan.partition) > 3
    assert _same_bits(captured, plan)
