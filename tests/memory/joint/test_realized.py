"""Values that Inductor writes to memory although only fused kernels read them, beside the code that it generates."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional

from partita.memory import Rates
from partita.memory.joint import simulation
from partita.torch_compile import memory_partition

_RATES = Rates(matmul_flops=1e14, attention_flops=1e14, bytes=1e12, call=5e-6)
_CHANNELS, _SIZE = 16, 24


class GroupNorms(nn.Module):
    """The float32 copy of a norm's result is read by the convolution's input, and again by the gradient of silu."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, _CHANNELS) for _ in range(3))
        self.convolutions = nn.ModuleList(nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            x = x + convolution(functional.silu(norm(x)))
        return x.float().square().mean()


class LayerNorms(nn.Module):
    """One reduction over the last dimension, which a kernel holds together with what is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_SIZE) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(_SIZE, _SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(functional.silu(norm(x)))
        return x.float().square().mean()


@pytest.fixture(autouse=True)
def _forget_compiled() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _input() -> Tensor:
    return torch.randn(2, _CHANNELS, _SIZE, _SIZE, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize(("kind", "count"), [(GroupNorms, 3), (LayerNorms, 0)])
def test_a_value_that_several_kernels_read_is_in_memory(
    kind: type[nn.Module], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[Any] = []
    order_of = simulation.backward_order

    def recorded(*args: Any, **options: Any) -> Any:
        orders.append(order_of(*args, **options))
        return orders[-1]

    monkeypatch.setattr(simulation, "backward_order", recorded)
    backend = aot_autograd(
        fw_compiler=lambda gm, _: gm,
        bw_compiler=lambda gm, _: gm,
        partition_fn=memory_partition(1.0, rates=_RATES),
        decompositions=select_decomp_table(),
    )
    torch.manual_seed(0)
    torch.compile(kind().to(torch.bfloat16), backend=backend)(_input())
    assert orders
    for order in orders:
        large = [node for node in order.realized if node.meta["val"].numel() == _input().numel()]
        assert len(large) == count
        assert {node.meta["val"].dtype for node in large} <= {torch.float32}


@pytest.mark.slow
def test_every_large_buffer_of_the_generated_backward_is_predicted() -> None:
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    model, plans = GroupNorms().to(torch.bfloat16), list[Any]()
    options = {"peak": 1.0, "rates": _RATES, "on_plan": plans.append}
    compiled = torch.compile(model, backend="partita", options=options)

    def step() -> None:
        compiled(_input()).backward()

    with torch._inductor.config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(step)
    generated: Counter[tuple[int, str]] = Counter()
    for shape, dtype in re.findall(r"empty_strided_cpu\(\(([^)]*)\), \([^)]*\), torch\.(\w+)\)", codes[-1]):
        count = 1
        for size in filter(None, (text.strip() for text in shape.split(","))):
            count *= int(size)
        generated[count, dtype] += count >= _input().numel()
    predicted: Counter[tuple[int, str]] = Counter()
    simulated = plans[0].simulated
    for (node, _), (phase, _) in zip(simulated.series, simulated.phases, strict=True):
        made = node.meta["val"]
        for value in made if isinstance(made, tuple | list) else [made]:
            if phase != "forward" and isinstance(value, Tensor):
                predicted[value.numel(), str(value.dtype).removeprefix("torch.")] += 1
    assert +generated
    assert not generated - predicted
    assert generated[_input().numel(), "float32"] >= 3
