"""The command line runs, says what it does, and tells success from failure."""

from __future__ import annotations

import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

import partita
from partita.cli import main
from partita.cli.demo import modes, onnx_runtime, reload, splitting
from partita.cli.demo.distilled import seeded


@pytest.fixture(scope="module")
def demo() -> str:
    """What the demo prints when it succeeds."""
    printed = StringIO()
    with redirect_stdout(printed):
        assert main(["demo"]) == 0
    return printed.getvalue()


def test_the_demo_runs_to_the_end(demo: str) -> None:
    assert demo.rstrip().endswith("All of it held.")
    head = next(line for line in demo.splitlines() if line.strip().startswith("region "))
    assert head.split() == [
        "region",
        "nodes",
        "in",
        "out",
        "bytes",
        "in",
        "bytes",
        "out",
        "flops",
        "treatment",
        "label",
    ]
    assert "Call()" in demo
    assert all(f"\n{number}. " in demo for number in (1, 2, 3))


def test_the_chapter_on_modes_shows_the_tree_and_the_round_trip(demo: str) -> None:
    told = [line.strip() for line in demo.partition("\n3. ")[2].splitlines()]
    assert "+- autocast on cpu float16: 10 operators, linear .. linear_1" in told
    assert "+- no_grad: 2 operators, linear .. relu" in told
    verdicts = {line.split()[0]: line.split()[-1] for line in told if line.endswith(("same", "WRONG"))}
    assert verdicts == {"torch.export": "WRONG", "partita.capture": "same"}
    steps = [line.partition(":")[0] for line in told if line.startswith(("wrapped", "saved", "loaded", "dissolved"))]
    assert steps == ["wrapped", "saved", "loaded", "dissolved"]
    assert sum("nothing differs in 3 calls" in line for line in told) == 2


def test_the_chapter_on_modes_says_that_onnx_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnx_runtime, "find_spec", lambda name: None)
    monkeypatch.setattr(modes, "_tell_file", lambda wrapped: True)
    assert modes.tell()
    assert "which are not all installed" in capsys.readouterr().out


def test_the_chapter_on_modes_reports_a_file_that_differs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, args = seeded()
    with torch.no_grad():
        model.student.bias.add_(1)
    torch.export.save(partita.capture(model, args).exported(), tmp_path / "other.pt2")
    assert reload.main(str(tmp_path / "other.pt2")) == 1
    assert "difference" in capsys.readouterr().out


def test_the_package_runs_as_a_program() -> None:
    found = subprocess.run([sys.executable, "-m", "partita.cli", "--help"], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("usage: partita")


def test_a_chapter_that_fails_is_told_by_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("partita.cli.demo._CHAPTERS", (splitting,))
    monkeypatch.setattr(splitting, "tell", lambda: False)
    assert main(["demo"]) == 1
    assert "did not hold" in capsys.readouterr().out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nothing"]])
def test_no_command_or_an_unknown_one_is_an_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
