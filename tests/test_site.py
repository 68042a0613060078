"""The documents build as a site, and Sphinx warns of nothing: no broken link, no page outside of the navigation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install '.[docs]'")
pytest.importorskip("myst_parser", reason="MyST is not installed: pip install '.[docs]'")
pytest.importorskip("furo", reason="furo is not installed: pip install '.[docs]'")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    build = subprocess.run(
        [*command, "-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    assert (tmp_path / "site" / "index.html").exists()
