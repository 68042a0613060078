"""Spoilt archives: none runs anything, hangs or takes the memory of its reader, whatever was spoilt."""

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
