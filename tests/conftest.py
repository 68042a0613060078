"""How all tests run: hypothesis profiles, one torch thread, a known random state."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

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
