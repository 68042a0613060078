"""The order in which Inductor runs a backward, as allocations of compiled steps on a GPU have shown it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node
from torch.nn import functional

from partita.memory import Rates
from partita.memory.joint import simulation
from partita.memory.joint.order import Lifetimes, Order, last_uses
from partita.torch_compile import memory_partition

_RATES = Rates(matmul_flops=1e12, attention_flops=1e12, bytes=1e11, call=5e-6)
_ROWS, _WIDTH, _INNER = 256, 32, 96


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(_WIDTH, _INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(_INNER, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        fed: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return x + fed


class Product(Gated):
    def forward(self, x: Tensor) -> Tensor:
        fed: Tensor = self.down(self.gate(x) * self.up(x))
        return x + fed


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, _INNER), nn.Linear(_INNER, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fed: Tensor = self.down(functional.gelu(self.up(x)))
        return x + fed


@pytest.fixture(autouse=True)
def _forget_compiled() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _backward_of(block: nn.Module, compiled: list[GraphModule] | None = None) -> list[tuple[Node, int]]:
    """What the backward of three blocks allocates, in order; `compiled` gets the graph that is compiled."""
    partition = memory_partition(1.0, rates=_RATES)

    def compile_backward(gm: GraphModule, _: object) -> GraphModule:
        if compiled is not None:
            compiled.append(gm)
        return gm

    backend = aot_autograd(
        fw_compiler=lambda gm, _: gm,
        bw_compiler=compile_backward,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    model = nn.Sequential(*(type(block)() for _ in range(3)))
    torch.compile(model, backend=backend)(torch.randn(_ROWS, _WIDTH)).square().sum().backward()
    (plan,) = partition.plans.found
    series = list(plan.simulated.series)
    start = next(at for at, (node, _) in enumerate(series) if node.meta.get("partitioner_tag") == "is_backward")
    return series[start:]


def _is_large(node: Node) -> bool:
    return node.meta["val"].numel() == _ROWS * _INNER


def test_values_that_read_the_same_are_written_by_one_kernel() -> None:
    """The gradients of gate and up."""
    order = [node for node, _ in _backward_of(Gated())]
    written = [at for at, node in enumerate(order) if _is_large(node) and "mm" not in node.name]
    assert len(written) == 6
    assert all(second == first + 1 for first, second in zip(written[::2], written[1::2], strict=True))


def test_a_kernel_frees_no_input_before_its_last_output_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Order, Lifetimes]] = []

    def recorded(model: Any, order: Order, *rest: Any) -> Lifetimes:
        seen.append((order, last_uses(model, order, *rest)))
        return seen[-1][1]

    monkeypatch.setattr(simulation, "last_uses", recorded)
    _backward_of(Product())
    order, lifetimes = seen[-1]
    place = {node: at for at, node in enumerate(order.nodes)}
    assert len(order.last_of_kernel) == 6
    early = 0
    for node, last in order.last_of_kernel.items():
        for base in lifetimes.sources[node]:
            early += lifetimes.last[base] < place[last]
            assert lifetimes.freed[base] >= place[last]
    assert early  # One of two gradients reads the gate, the other one does not.


def test_of_two_products_the_one_that_frees_more_runs_first() -> None:
    """The gradient of `down.weight` frees the hidden value; that of the hidden value then takes its place."""
    order = [node for node, _ in _backward_of(Wide())]
    products = [node for node in order if node.name.startswith("mm")]
    weights = [at for at, node in enumerate(products) if node.meta["val"].shape == (_WIDTH, _INNER)]
    hidden = [at for at, node in enumerate(products) if _is_large(node)]
    assert len(weights) == len(hidden) == 3
    assert all(weight < large for weight, large in zip(weights, hidden, strict=True))


def test_the_compiler_gets_products_in_the_order_that_the_plan_counts_with() -> None:
    """Inductor keeps it where no other order is lower in all."""
    compiled: list[GraphModule] = []
    counted = [node.name for node, _ in _backward_of(Wide(), compiled) if node.name.startswith("mm")]
    (graph_module,) = compiled
    ran = [node.name for node in graph_module.graph.nodes if node.name.startswith("mm")]
    assert ran == counted
    assert ran != sorted(ran, key=lambda name: int(name.partition("_")[2] or 0))
