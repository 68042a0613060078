"""The rows as a table for people and as JSON for later comparison."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.rows import Row, Target, at_least, at_most

__all__ = ["as_json", "from_json", "line", "markdown", "merged", "put_into_readme"]

_BEGIN, _END = "<!-- table: begin -->", "<!-- table: end -->"
_HEAD = ("measured", "case", "ours", "beside", "theirs", "reading", "target", "")


def line(row: Row) -> str:
    """One row for a terminal."""
    section, case, ours, beside, other, reading, target, verdict = _cells(row)
    return f"{section:24} {case:44} {ours:>14}  {beside:20} {other:>14}  {reading:>20}  {target:7} {verdict}".rstrip()


def markdown(rows: Iterable[Row]) -> str:
    """All rows as a Markdown table."""
    lines = [_HEAD, ("---",) * len(_HEAD), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def as_json(rows: Sequence[Row], command: str) -> str:
    """All rows with the command and the machine that made them."""
    found = [
        {**asdict(row), "target": None if row.target is None else str(row.target), "verdict": row.verdict}
        for row in rows
    ]
    return json.dumps({"command": command, "machine": machine(), "rows": found}, indent=1) + "\n"


def from_json(text: str) -> list[Row]:
    """The rows that `as_json` wrote."""
    found = [{key: value for key, value in row.items() if key != "verdict"} for row in json.loads(text)["rows"]]
    return [Row(**{**row, "target": _target(row["target"])}) for row in found]


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The new rows in the place of old ones that measured the same case."""
    measured = {(row.section, row.case) for row in new}
    return [*(row for row in old if (row.section, row.case) not in measured), *new]


def _target(text: str | None) -> Target | None:
    if text is None:
        return None
    kind, _, bound = text.partition(" ")
    return at_least(float(bound)) if kind == ">=" else at_most(float(bound))


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    kind = f"{platform.system()} {platform.machine()}"
    return {"torch": torch.__version__, "python": platform.python_version(), "platform": kind}


def put_into_readme(path: Path, rows: Sequence[Row], command: str) -> None:
    """Replaces the table of the README."""
    text = path.read_text()
    before, after = text[: text.index(_BEGIN)], text[text.index(_END) :]
    made_by = ", ".join(f"{name} {version}" for name, version in machine().items())
    path.write_text(f"{before}{_BEGIN}\nMade by `{command}` ({made_by}).\n\n{markdown(rows)}\n{after}")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.section,
        row.case,
        f"{_number(row.ours)} {row.unit}",
        row.beside,
        "" if row.other is None else f"{_number(row.other)} {row.unit}",
        "" if row.value is None else f"{_number(row.value)} {row.reading}",
        "" if row.target is None else str(row.target),
        row.verdict,
    )


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
