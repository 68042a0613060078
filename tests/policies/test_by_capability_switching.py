"""`switch_cost` of ByCapability: regions too small for a switch go to a later backend, or to the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Node

import partita
from partita import Region
from partita.errors import CallbackError, OptionError
from partita.policies import ByCapability
from partita.testing.generator.draft import Case
from partita.testing.strategies import programs
from partita.treatments import Call


def first(node: Node) -> str | None:
    """Linear layers, and some small work between them."""
    return None if node.target in (torch.ops.aten.linear.default, torch.ops.aten.sin.default) else "no"


def second(node: Node) -> None:
    return None


def relus(node: Node) -> str | None:
    return None if node.target is torch.ops.aten.relu.default else "no"


class Layers(nn.Module):
    """Large layers with a sine of 128 bytes after each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            x = x[:, :1].sin().cos() + x
        return x


PROGRAM = partita.capture(Layers(), (torch.randn(32, 64),))


def names(capabilities: Any, cost: Any) -> list[str]:
    return [region.label or "" for region in ByCapability(capabilities, switch_cost=cost)(PROGRAM)]


def test_a_later_backend_takes_what_would_only_cause_a_switch() -> None:
    assert names((first, second), 0) == ["first", "second"] * 8
    assert names((first, second), 1_000) == ["first", "second"] * 4


def test_the_caller_takes_what_no_other_backend_takes() -> None:
    for capabilities in ((first,), (first, relus)):
        plan = partita.plan(PROGRAM, ByCapability(capabilities, switch_cost=1_000), Call())
        assert [region.label for region in plan.partition].count("first") == 4
        assert "computes 128 bytes, and a switch to first costs 1000" in plan.explain("sin")


def test_bytes_of_symbolic_sizes_are_those_of_the_trace() -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    program = partita.capture(Layers(), (torch.randn(32, 64),), dynamic_shapes=({0: rows},))
    labels = [region.label for region in ByCapability((first, second), switch_cost=1_000)(program)]
    assert labels.count("first") == 4


def test_what_was_not_traced_is_not_handed_over() -> None:
    program = partita.Program.of(torch.fx.symbolic_trace(lambda x: x.sin()))
    assert len(ByCapability(second, switch_cost=10**9)(program)) == 1


def test_the_cost_may_depend_on_the_region() -> None:
    def cost(region: Region) -> int:
        return 10**9 if region.name == "first" else 0

    assert names((first, second), cost) == ["second"]


def test_a_high_cost_leaves_everything_to_the_caller() -> None:
    assert names((first, second), 10**12) == []


@pytest.mark.parametrize("cost", [-1, 1.5, "1 kB", None, True])
def test_a_cost_is_bytes_or_a_function(cost: Any) -> None:
    with pytest.raises(OptionError, match="`switch_cost` is a number of bytes"):
        ByCapability(first, switch_cost=cost)


def test_a_function_that_returns_no_bytes_is_named() -> None:
    with pytest.raises(CallbackError, match=r"`switch_cost` returned 1\.5"):
        names((first,), lambda region: 1.5)


@given(programs(), st.integers(0, 500))
def test_cuts_stay_legal_and_regions_do_not_become_more(case: Case, cost: int) -> None:
    def odd(node: Node) -> str | None:
        return None if len(node.name) % 2 else "even"

    program = partita.Program.of(case.graph_module)
    strict, cheap = (ByCapability((odd, second), switch_cost=one)(program) for one in (0, cost))
    assert len(cheap) <= len(strict)
    assert {node for region in cheap for node in region.nodes} <= {node for region in strict for node in region.nodes}
