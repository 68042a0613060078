"""Every script of `examples/` runs to its end, in a process where it is the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [path for path in sorted((ROOT / "examples").glob("*.py")) if "def main(" in path.read_text(encoding="utf-8")]
#: Each starts two processes, which import torch and compile.
SHARDED, SERVE = (ROOT / "examples" / name for name in ("sharded_training.py", "serve.py"))
QUICK = [script for script in SCRIPTS if script not in (SHARDED, SERVE)]


#: Runs the scripts that it is given one after the other, as `python script.py` does, and tells what each has printed.
_ONE_AFTER_THE_OTHER = """
import contextlib, io, runpy, sys
for script in sys.argv[1:]:
    sys.argv, sys.path[0] = [script], script.rpartition("/")[0]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    print(script, len(printed.getvalue().strip()) > 0)
"""


def test_the_scripts_run_one_after_the_other(tmp_path: Path) -> None:
    """Most of the time is for importing torch, so they share a process."""
    told = _run("-c", _ONE_AFTER_THE_OTHER, *map(str, QUICK), folder=tmp_path)
    assert told.splitlines() == [f"{script} True" for script in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_script_runs(script: Path, tmp_path: Path) -> None:
    if script == SHARDED and not dist.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    if script == SERVE:
        pytest.skip("it has a test of its own")
    assert _run(str(script), folder=tmp_path).strip()


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize(("name", "compiled"), [("llama", 3), ("mixtral", 4)])
def test_a_served_model_is_compiled_once_for_all_sizes_and_processes(name: str, compiled: int, tmp_path: Path) -> None:
    """The second layer of a Mixtral gets sizes that the first one has computed, so that it is a body of its own."""
    pytest.importorskip("transformers")
    first, again = _run(str(SERVE), name, str(tmp_path / "cache"), folder=tmp_path).split("in a new process:")
    assert f"4 pieces, {compiled} compiled for 3 sizes" in first
    assert "6 pieces, 0 compiled for 3 sizes" in again
    assert "was compiled in" not in again


def _run(*arguments: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_there_are_examples() -> None:
    assert len(SCRIPTS) >= 3
    assert {SHARDED, SERVE} <= set(SCRIPTS)
