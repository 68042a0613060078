"""Every script of `examples/` runs to its end, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [path for path in sorted((ROOT / "examples").glob("*.py")) if "def main(" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_script_runs(script: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()


def test_there_are_examples() -> None:
    assert len(SCRIPTS) >= 3
