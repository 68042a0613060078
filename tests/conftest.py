"""How all tests run: hypothesis profiles, one torch thread, a known random state."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from partita._torch.ambient import read_ambient, restore_autocast

# One profile is small and the same in every run; the other looks for new graphs and remembers those that failed.
settings.register_profile(
    "quick",
    max_examples=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz",
    max_examples=2000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Tests run side by side, and sums must not depend on how many threads share them.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _known_random_state() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _modes_as_they_were() -> Iterator[None]:
    """Some tests run graphs that leave a mode switched; the tests after them shall not know."""
    before = read_ambient()
    yield
    torch.set_grad_enabled(before.grad)
    restore_autocast(before)
