"""Files of small models, which all tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.partita_cli.helpers import counting, saved, small


@pytest.fixture(autouse=True)
def _no_settings_for_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "NO_COLOR", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(small(), tmp_path_factory.mktemp("models") / "small.pt2")


@pytest.fixture(scope="session")
def counting_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(counting(), tmp_path_factory.mktemp("models") / "counting.pt2")
