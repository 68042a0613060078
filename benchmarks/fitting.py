"""How long a memory plan takes: measured in a process of its own, on tensors without memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.compile_once import Model
from benchmarks.timing import CPU, clocked
from partita import capture_joint
from partita.memory import MemoryPlan, Rates, StepMemory, step_memory
from partita.memory.joint.plan import JointMemoryPlan
from partita.torch_compile import memory_partition

__all__ = ["compiled_plan_of_blocks", "memory_plan_of_llama"]


#: About those of a GPU.
_RATES = Rates(matmul_flops=4e14, attention_flops=2e14, bytes=3e12, call=5e-6)


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
    found: dict[str, StepMemory | MemoryPlan] = {}

    def attempt() -> None:
        found["step"] = step_memory(model, (), {"input_ids": ids, "labels": ids.clone()}, rates=_RATES)

    def decide() -> None:
        step = found["step"]
        assert isinstance(step, StepMemory)
        found["plan"] = step.plan((step.smallest_peak_bytes + step.plain_peak_bytes) // 2)

    tried, planned = clocked(attempt, CPU)[0], clocked(decide, CPU)[0]
    plan = found["plan"]
    assert isinstance(plan, MemoryPlan)
    return {"tried": tried, "planned": planned, "peak": plan.peak_bytes, "asked": plan.budget_bytes}


def compiled_plan_of_blocks(layers: int, width: int = 1024) -> dict[str, float]:
    """The CPU seconds to plan the joint graph of so many blocks, as Inductor would compile it, for half of its peak.

    Its tensors are on the meta device. The joint graph is made before the clock starts.
    """

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model([width] * layers)

        def forward(self, x: Tensor) -> Tensor:
            squared: Tensor = self.model(x).square().mean()
            return squared

    with torch.device("meta"):
        program = capture_joint(Loss(), (torch.zeros(8, 2048, width),))
    partition = memory_partition(0.5, rates=_RATES, resident_bytes=0)
    found: dict[str, JointMemoryPlan] = {}

    def decide() -> None:
        found["plan"] = partition.planned(program)

    planned = clocked(decide, CPU)[0]
    plan = found["plan"]
    return {"nodes": len(program.graph.nodes), "planned": planned, "peak": plan.peak_bytes, "asked": plan.allowed_bytes}
