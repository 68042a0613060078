"""Files of small models, which all tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.partita_cli.helpers import counting, saved, small


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(small(), tmp_path_factory.mktemp("models") / "small.pt2")


@pytest.fixture(scope="session")
def counting_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(counting(), tmp_path_factory.mktemp("models") / "counting.pt2")
