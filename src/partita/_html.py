"""Small HTML for notebooks: tables of texts, which are always escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

#: A notebook shows so many rows, and how many there are besides.
MOST_ROWS = 200

_STYLE = "padding: 2px 10px; vertical-align: top; white-space: pre-wrap; text-align:"


def html_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", notes: Sequence[str] = ()
) -> str:
    """A table of texts; columns of numbers are aligned right."""
    shown = rows[:MOST_ROWS]
    sides = ["right" if shown and all(_is_number(row[at]) for row in shown) else "left" for at in range(len(head))]
    lines = [_row("td", row, sides) for row in shown]
    more = [f"{len(rows) - MOST_ROWS:,} more rows"] if len(rows) > MOST_ROWS else []
    caption = f'<caption style="text-align: left; padding: 4px 10px">{escape(title)}</caption>' if title else ""
    table = f"<table>{caption}<thead>{_row('th', head, sides)}</thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<div>{table}{_notes([*more, *notes])}</div>"


def html_facts(facts: Mapping[str, object], *, notes: Sequence[str] = ()) -> str:
    """A table of names and values."""
    rows = [_row("td", (name, str(value)), ("left", "left")) for name, value in facts.items()]
    return f"<div><table><tbody>{''.join(rows)}</tbody></table>{_notes(notes)}</div>"


def _row(kind: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    made = (f'<{kind} style="{_STYLE} {side}">{escape(cell)}</{kind}>' for cell, side in zip(cells, sides, strict=True))
    return f"<tr>{''.join(made)}</tr>"


def _notes(lines: Sequence[str]) -> str:
    return "".join(f'<div style="padding: 1px 10px; white-space: pre-wrap">{escape(line)}</div>' for line in lines)


def _is_number(text: str) -> bool:
    return text in ("", "?") or text.replace(",", "").removeprefix("-").isdecimal()
