"""The command line runs, says what it does, and tells success from failure."""

from __future__ import annotations

import subprocess
import sys

import pytest

from partita.cli import main
from partita.cli.demo import splitting


def test_the_demo_runs_to_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    told = capsys.readouterr()
    assert told.out.rstrip().endswith("All of it held.")
    head = next(line for line in told.out.splitlines() if line.strip().startswith("region "))
    assert head.split() == ["region", "nodes", "in", "out", "bytes", "in", "bytes", "out", "treatment", "label"]
    assert "Call()" in told.out
    assert [f"{number}. " in told.out for number in (1, 2)] == [True, True]


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
