"""Tracers and forward-mode AD: they see the operators of a lowered region, whether it was compiled before or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.lowering.helpers import Counting, plan_of
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import GraphModule

from partita.treatments import Lower


def wave(x: Tensor) -> Tensor:
    return (x.sin() * 2).cos()


class Opaque(Counting):
    """Its functions lose tangents, as Inductor's kernels do."""

    def compile(self, body: GraphModule, inputs: Sequence[Any]) -> Any:
        self.made.append(list(inputs))

        def function(*values: Tensor) -> Any:
            return body(*(value.detach().clone() for value in values))

        return function


@pytest.mark.parametrize("is_compiled", [False, True])
def test_tangents_flow_through_a_region(is_compiled: bool) -> None:
    backend = Opaque()
    module = plan_of(wave, Lower(backend)).apply().module()
    x, tangent = torch.randn(4), torch.randn(4)
    if is_compiled:
        module(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        found = forward_ad.unpack_dual(module(dual)).tangent
        assert torch.equal(found, forward_ad.unpack_dual(wave(dual)).tangent)
    module(x)
    assert len(backend.made) == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_lowered_program_can_be_traced_symbolically(is_compiled: bool, strict: bool) -> None:
    decided = plan_of(wave, Lower("aot_eager", strict=strict))
    module, x = decided.apply().module(), torch.randn(4)
    if is_compiled:
        module(x)
    traced = torch.fx.symbolic_trace(module)
    assert [node.target for node in traced.graph.nodes if node.op == "call_method"] == ["sin", "cos"]
    assert torch.equal(traced(x), wave(x))
    assert len(decided.failures) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_lowered_program_can_be_traced_by_jit(is_compiled: bool, strict: bool) -> None:
    decided = plan_of(wave, Lower(Opaque(), strict=strict))
    module, x = decided.apply().module(), torch.randn(4)
    if is_compiled:
        module(x)
    traced = torch.jit.trace(module, (x,))
    assert "aten::sin" in str(traced.inlined_graph)
    assert torch.equal(traced(x), wave(x))
    assert torch.equal(module(x), wave(x))
    assert len(decided.failures) == 0
