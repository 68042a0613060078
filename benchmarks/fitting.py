"""How long a memory plan takes: measured in a process of its own, on tensors without memory."""

from __future__ import annotations

import torch

from benchmarks.timing import CPU, clocked
from partita.memory import MemoryPlan, Rates, StepMemory, step_memory

__all__ = ["memory_plan_of_llama"]


def memory_plan_of_llama(layers: int, tokens: int = 8192) -> dict[str, float]:
    """The CPU seconds to try the training step of a Llama of Llama-3-70B's sizes, and to plan it for half way down.

    Its tensors are on the meta device. Capture, which is torch's export for the most part, is in the first number.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(1, tokens, dtype=torch.long)
    rates = Rates(matmul_flops=4e14, attention_flops=2e14, bytes=3e12, call=5e-6)
    found: dict[str, StepMemory | MemoryPlan] = {}

    def attempt() -> None:
        found["step"] = step_memory(model, (), {"input_ids": ids, "labels": ids.clone()}, rates=rates)

    def decide() -> None:
        step = found["step"]
        assert isinstance(step, StepMemory)
        found["plan"] = step.plan((step.smallest_peak_bytes + step.plain_peak_bytes) // 2)

    tried, planned = clocked(attempt, CPU)[0], clocked(decide, CPU)[0]
    plan = found["plan"]
    assert isinstance(plan, MemoryPlan)
    return {"tried": tried, "planned": planned, "peak": plan.peak_bytes, "asked": plan.budget_bytes}
