"""Blocks that are equal, or nearly: sharing bodies and compiled functions changes nothing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from partita.testing import LawError
from partita.testing.fuzz import fuzz
from partita.testing.generator.near_repeats import DIFFERENCES, near_repeats
from partita.testing.laws.repeats import check_compiled_repeats_law


def test_blocks_that_share_bodies_are_the_same() -> None:
    tally = fuzz(0, 24, repeats="call")
    assert tally.broken == ()
    assert tally.legal > 6


def test_blocks_that_share_functions_are_the_same() -> None:
    tally = fuzz(100, 6, repeats="lower")
    assert tally.broken == ()
    assert tally.legal > 0


def test_rounding_that_a_model_magnifies_is_no_difference() -> None:
    """Two readers of the first block's result add their gradients in another order; double precision agrees."""
    assert fuzz(5011, 1, repeats="lower").broken == ()


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["call", "lower", "compile"])
def test_many_near_equal_blocks_are_the_same(shared: str) -> None:
    assert fuzz(1000, 300 if shared == "call" else 30, repeats=shared).broken == ()


def test_every_difference_turns_up() -> None:
    assert {name for seed in range(300) for _, name in near_repeats(seed).differences} == set(DIFFERENCES)


def test_a_wrongly_shared_body_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def share_everything(partition: Any, treatments: Any, sites: Any) -> list[int]:
        sizes: dict[Any, int] = {}
        borders = partition.borders.of_regions
        keys = [(len(border.inputs), len(border.outputs)) for border in borders]
        return [sizes.setdefault(key, at) for at, key in enumerate(keys)]

    monkeypatch.setattr(sys.modules["partita.plans.plan"], "_shared_bodies", share_everything)
    tally = fuzz(0, 8, repeats="call")
    assert tally.broken
    assert all("near_repeats(" in case for case in tally.broken)


def test_a_wrongly_passed_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.analysis.number_operands._dtype_for", lambda *_, **__: torch.float64)
    assert fuzz(20, 1, repeats="call").broken


def test_an_error_in_single_precision_alone_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(gm: GraphModule, inputs: Any, *, options: Any = None) -> Any:
        def run(*args: Any) -> Any:
            if any(isinstance(one, Tensor) and one.dtype is torch.float32 for one in args):
                raise RuntimeError("not in single precision")
            return gm(*args)

        return run

    monkeypatch.setattr("partita.testing.laws.repeats.backend", failing)
    with pytest.raises(LawError, match="not in single precision"):
        check_compiled_repeats_law(near_repeats(1), "aot_eager")
