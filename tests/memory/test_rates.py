"""Measured rates, and what is predicted by them, in as many digits as they have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from partita.memory import measure_rates, rates
from partita.memory.rates import shown_milliseconds, two_digits


@pytest.fixture(autouse=True)
def _measured_anew() -> Iterator[None]:
    measure_rates.cache_clear()
    yield
    measure_rates.cache_clear()


def test_the_least_time_of_each_kernel_counts_although_another_process_slows_some_rounds_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0

    def seconds(*_: object) -> float:
        nonlocal calls
        calls += 1
        kernel, round_ = (calls - 1) % 4, (calls - 1) // 4
        loaded = 1 if round_ in (3, 9) else 5  # Most rounds are slow.
        return loaded * (1e-6, 1e-3, 2e-3, 3e-3)[kernel]

    monkeypatch.setattr(rates, "_seconds", seconds)
    found = measure_rates(torch.device("cpu"))
    assert found.call == pytest.approx(1e-6)
    assert found.matmul_flops == pytest.approx(2 * 512**3 / 1e-3)
    assert found.bytes == pytest.approx(3 * 512 * 512 * 4 / 3e-3)


def test_measuring_ends_although_times_always_improve(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def seconds(*_: object) -> float:
        nonlocal calls
        calls += 1
        return float(0.9 ** (calls // 4))

    monkeypatch.setattr(rates, "_seconds", seconds)
    measure_rates(torch.device("cpu"))
    assert calls <= 4 * 200


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (0.04083, "0.041"), (0.999, "1.0"), (1.26, "1.3"), (12.6, "13"), (1234.5, "1,200")],
)
def test_predictions_have_two_digits(number: float, shown: str) -> None:
    assert two_digits(number) == shown
    assert shown_milliseconds(number / 1e3) == f"{shown} ms"
