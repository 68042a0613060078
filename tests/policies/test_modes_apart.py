"""Policies that make runs cut where the mode changes, if they are told to or the treatment takes one mode a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import partita
from partita import Program
from partita.errors import ModeError, OptionError
from partita.policies import AroundOperators, BySize, SplitAt
from partita.treatments import Call, Lower


def _attends(x: Tensor) -> Tensor:
    with torch.no_grad():
        frequencies = x.cos() * 2
    x = scaled_dot_product_attention(x * frequencies, x, x)
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.transpose(-1, -2)
    return (y.float() @ x).relu()


@pytest.fixture(scope="module")
def program() -> Program:
    return partita.capture(_attends, (torch.randn(1, 4, 8),))


POLICIES: list[Callable[..., Any]] = [
    lambda **options: AroundOperators(scaled_dot_product_attention, **options),
    lambda **options: AroundOperators(scaled_dot_product_attention, alone=False, **options),
    lambda **options: AroundOperators((scaled_dot_product_attention, torch.relu), together=True, min_size=3, **options),
    lambda **options: BySize(parts=2, **options),
    lambda **options: BySize(operators=3, **options),
    lambda **options: SplitAt(lambda node: "attention" in node.name, **options),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_treatment_that_takes_one_mode_gets_regions_of_one_mode(program: Program, policy: Any) -> None:
    x = torch.randn(1, 4, 8, requires_grad=True)
    decided = partita.plan(program, policy(), Lower("aot_eager", strict=True))
    partita.verify(program, decided.apply(), (x,))
    modes, number = program.modes, program.index.number
    assert len({modes.at(number[node]) for node in program.operators()} - {modes.final}) >= 2
    for region in decided.partition:
        assert len({modes.at(number[node]) for node in region.nodes}) == 1
    # One cut for each change of the mode, and no node is lost.
    assert sum(map(len, decided.partition)) == sum(map(len, partita.plan(program, policy(), Call()).partition))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_treatment_that_takes_any_mode_gets_the_regions_as_they_are(program: Program, policy: Any) -> None:
    mixed = partita.plan(program, policy(), Call()).partition
    apart = partita.plan(program, policy(modes_apart=True), Call()).partition
    modes, number = program.modes, program.index.number
    most = [max(len({modes.at(number[node]) for node in region.nodes}) for region in cut) for cut in (mixed, apart)]
    assert most[0] > most[1] == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_modes_that_are_not_to_be_kept_apart_are_an_error_as_before(program: Program, policy: Any) -> None:
    with pytest.raises(ModeError, match="takes one mode a region"):
        partita.plan(program, policy(modes_apart=False), Lower("aot_eager"))


@pytest.mark.parametrize("policy", POLICIES)
def test_modes_apart_is_a_truth_value_or_none(policy: Any) -> None:
    with pytest.raises(OptionError, match="modes_apart is True, False, or None"):
        policy(modes_apart=1)
