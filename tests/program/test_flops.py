"""FLOPs of nodes: the same operator counts alike wherever it is counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import flop_registry

from partita.capture import capture_joint
from partita.memory._torch.inductor import flops_of
from partita.memory._torch.recorder import Recorder
from partita.program.flops import Flops

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
#: Two products of 2 heads, 8 by 8 positions and 4 channels; the backward has five.
PRODUCT = 2 * 2 * 8 * 8 * 4


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x).sum()


def test_attention_on_a_cpu_counts_alike_in_a_graph_and_in_a_step_that_runs() -> None:
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    graph = capture_joint(Attention(), (x,)).graph
    for operator, expected in ((FORWARD, 2 * PRODUCT), (BACKWARD, 5 * PRODUCT)):
        (node,) = graph.find_nodes(op="call_function", target=operator.default)
        assert (Flops().of(node), flops_of(node)) == (expected, expected)
    with Recorder() as recorder:
        Attention()(x).backward()
    ran = {one.operator: one.flops for one in recorder.record.ran if "flash" in one.operator}
    assert ran == {str(FORWARD.default): 2 * PRODUCT, str(BACKWARD.default): 5 * PRODUCT}


def test_a_formula_that_a_user_registers_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flop_registry, FORWARD, lambda *_, **__: 7)
    graph = capture_joint(Attention(), (torch.randn(1, 2, 8, 4, requires_grad=True),)).graph
    (node,) = graph.find_nodes(op="call_function", target=FORWARD.default)
    assert (Flops().of(node), flops_of(node)) == (7, 7)
