"""Spoilt archives, and calls with odd arguments: none runs anything, hangs, or takes the memory of its reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.processes import run_in_new_process
from tests.program.archives.archive_fuzz import write_programs

_CHILD = (
    "import sys; from pathlib import Path; from tests.program.archives.archive_fuzz import main;"
    "main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("programs")
    write_programs(made)
    return made


def faults(folder: Path, first: int, count: int) -> list[str]:
    """What went wrong with these seeds, each process that was killed among it; a spoilt program may kill itself."""
    found, end = [], first + count
    while first < end:
        finished = run_in_new_process(_CHILD, folder, first, end - first)
        lines = finished.stdout.splitlines()
        found += [line for line in lines if line.startswith("broken")]
        if lines and lines[-1].startswith("done"):
            return found
        steps = [line.split() for line in lines if line[:1].isdigit()]
        assert steps, finished.stderr
        seed, phase = steps[-1]
        if phase != "call":
            found.append(f"seed {seed} was killed at {phase!r}: {finished.stderr[-300:]}")
        first = int(seed) + 1
    return found


def test_spoilt_archives_load_as_data_or_not_at_all(folder: Path) -> None:
    assert faults(folder, 0, 24) == []


@pytest.mark.fuzz
@pytest.mark.parametrize("first", range(100_000, 110_000, 500))
def test_many_spoilt_archives_load_as_data_or_not_at_all(folder: Path, first: int) -> None:
    assert faults(folder, first, 500) == []


_CALLS = "import sys; from tests.program.archives.operator_fuzz import main; main(int(sys.argv[1]), int(sys.argv[2]))"


def faults_of_calls(first: int, count: int) -> list[str]:
    """Calls of operators that took too much memory, or by which the process was killed."""
    found, end = [], first + count
    while first < end:
        lines = run_in_new_process(_CALLS, first, end - first).stdout.splitlines()
        found += [line for line in lines if line.startswith("broken")]
        assert lines
        if lines[-1] == "done":
            return found
        found.append(f"killed at call {lines[-1]}")
        first = int(lines[-1].split()[0]) + 1
    return found


@pytest.mark.slow
def test_operators_are_dry_run_with_odd_arguments() -> None:
    assert faults_of_calls(0, 200) == []


@pytest.mark.fuzz
@pytest.mark.parametrize("first", range(1_000_000, 1_100_000, 5_000))
def test_all_operators_are_dry_run_with_odd_arguments(first: int) -> None:
    assert faults_of_calls(first, 5_000) == []
