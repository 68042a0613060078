"""Training steps that fit a budget: generated ones keep their bits, from the plain peak to the smallest."""

from __future__ import annotations

from typing import Any

import pytest

from partita.memory import plan as plans
from partita.testing.fuzz import fuzz


def test_generated_steps_keep_their_bits_at_every_budget() -> None:
    tally = fuzz(0, 12, fit="eager")
    assert tally.broken == ()
    assert tally.legal > 6


def test_generated_steps_keep_their_bits_compiled() -> None:
    tally = fuzz(200, 3, fit="aot_eager")
    assert tally.broken == ()
    assert tally.legal > 1


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_many_generated_steps_keep_their_bits(compiler: str) -> None:
    assert fuzz(1000, 150 if compiler == "eager" else 30, fit=compiler).broken == ()


def test_a_prediction_that_is_too_low_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plans.peak_of_program

    def lower(*args: Any) -> int:
        return before(*args) // 2

    monkeypatch.setattr(plans, "peak_of_program", lower)
    tally = fuzz(0, 3, fit="eager")
    assert any("takes at most its budget" in case for case in tally.broken)
