"""CONTRIBUTING says where things live: each file that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import partita

ROOT = Path(__file__).parents[1]
PACKAGE = Path(partita.__file__).parent
NAMED = re.compile(r"`([\w/.]+\.(?:py|js|html|toml|txt)|[\w/]+/)`")


def missing_files(text: str) -> list[str]:
    """The names of files and folders that are nowhere; a short one is beside the file named before it, or below."""
    missing, folder = [], PACKAGE
    for name in NAMED.findall(text):
        found = [base / name for base in (PACKAGE, PACKAGE.parent, ROOT, folder) if (base / name).exists()]
        if not found:
            missing.append(name)
            continue
        folder = found[0] if found[0].is_dir() else found[0].parent
    return missing


def test_every_file_that_contributing_names_is_there() -> None:
    # What comes before names what `make` makes.
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Where things live")[2]
    assert len(NAMED.findall(text)) > 100
    assert not missing_files(text)


def test_a_file_that_is_nowhere_is_found() -> None:
    assert missing_files("`lowering/lower.py`, `lowered.py` beside it, `lowering/moved.py`") == ["lowering/moved.py"]
