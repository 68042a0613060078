"""What `verify` raises names the region that differs."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
import torch
from tests.equivalence.test_bisect import Chain, WrongExp, X
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

import partita
from partita.errors import VerificationError
from partita.policies import BySize
from partita.treatments import Call, Lower


def _chain(exp_at: int = 13) -> partita.Program:
    return partita.Program.of(symbolic_trace(Chain(24, exp_at)))


@pytest.mark.parametrize("exp_at", [0, 13, 23])
def test_the_region_that_differs_is_named(exp_at: int) -> None:
    program = _chain(exp_at)
    plan = partita.plan(program, BySize(parts=12), WrongExp())
    (guilty,) = (region.name for region in plan.partition if any(node.target is torch.exp for node in region.nodes))
    with pytest.raises(VerificationError, match=rf"region '{guilty}' differs by itself, treated by WrongExp\(\)"):
        partita.verify(program, plan.apply(), (X,))


def test_the_region_is_named_beside_the_model_as_well() -> None:
    model = Chain(24, 13)
    program = partita.capture(model, (X,))
    plan = partita.plan(program, BySize(parts=4), WrongAdd())
    with pytest.raises(VerificationError, match=r"region 'part_\d' differs by itself"):
        partita.verify(model, plan.apply(), (X,))


@dataclass(frozen=True)
class WrongAdd:
    """A treatment that is wrong for the exponential function, also in exported graphs."""

    def treat(self, body: GraphModule) -> nn.Module:
        for node in body.graph.nodes:
            if node.target is torch.ops.aten.exp.default:
                node.target = torch.ops.aten.exp2.default
        body.recompile()
        return body


def test_what_differed_before_the_plan_is_said() -> None:
    program = _chain()
    after = partita.plan(program, BySize(parts=4), Call()).apply()
    with pytest.raises(VerificationError, match="the program that it was applied to differs from the original already"):
        partita.verify(Chain(24, 12), after, (X,))


def test_a_program_that_differs_from_itself_is_said() -> None:
    calls = iter(range(1000))

    def counted(x: Tensor) -> Tensor:
        return x + next(calls)

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.sin, (graph.call_function(counted, (x,)),)))
    program = partita.Program.of(GraphModule(nn.Module(), graph))
    after = partita.plan(program, BySize(parts=2), Call()).apply()
    with pytest.raises(VerificationError, match="differs from itself when it is called twice"):
        partita.verify(program, after, (X,))


@pytest.mark.parametrize("locate", [True, False])
def test_the_regions_are_applied_again_only_to_find_one(locate: bool) -> None:
    treated = []

    @dataclass(frozen=True)
    class Counting:
        def treat(self, body: GraphModule) -> nn.Module:
            treated.append(body)
            return WrongExp().treat(body)

    program = _chain()
    after = partita.plan(program, BySize(parts=4), Counting()).apply(share_bodies=False)
    assert len(treated) == 4
    with pytest.raises(VerificationError) as raised:
        partita.verify(program, after, (X,), locate=locate)
    assert ("by itself" in str(raised.value)) is locate
    assert (len(treated) > 4) is locate


def test_a_program_before_that_is_gone_is_not_kept_alive() -> None:
    model = Chain(24, 13)
    after = partita.plan(partita.Program.of(symbolic_trace(model)), BySize(parts=4), WrongExp()).apply()
    gc.collect()
    with pytest.raises(VerificationError, match="do not mean the same") as raised:
        partita.verify(model, after, (X,))
    assert "by itself" not in str(raised.value)


def test_a_failure_while_looking_for_the_region_does_not_hide_what_differs() -> None:
    @dataclass(frozen=True)
    class Once:
        def treat(self, body: GraphModule) -> nn.Module:
            if treated:
                raise MemoryError("no room")
            treated.append(body)
            return WrongExp().treat(body)

    treated: list[GraphModule] = []
    program = _chain()
    after = partita.plan(program, BySize(parts=1), Once()).apply()
    with pytest.raises(VerificationError, match="value"):
        partita.verify(program, after, (X,))


def test_lowered_regions_are_named() -> None:
    program = _chain()
    plan = partita.plan(
        program, BySize(parts=4), lambda region: WrongExp() if region.name == "part_2" else Lower("eager")
    )
    with pytest.raises(VerificationError, match=r"region 'part_2' differs by itself"):
        partita.verify(program, plan.apply(), (X,))
