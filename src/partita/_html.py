"""Small HTML for notebooks: tables of texts, which are always escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

#: A notebook shows so many rows, and says how many there are besides.
MOST_ROWS = 200

_CELL = (
    "padding: 2px 10px; text-align: {}; font-variant-numeric: tabular-nums; white-space: pre-wrap; vertical-align: top"
)


def html_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "", notes: Sequence[str] = ()
) -> str:
    """A table of texts and numbers; numbers are aligned right, with separators, and None is a question mark."""
    found = list(rows)
    shown = [_row("td", row) for row in found[:MOST_ROWS]]
    if len(found) > MOST_ROWS:
        notes = (f"{len(found) - MOST_ROWS:,} more rows", *notes)
    numeric = [all(isinstance(row[at], int | float | None) for row in found) and bool(found) for at in range(len(head))]
    heads = "".join(_cell("th", text, is_number=number) for text, number in zip(head, numeric, strict=True))
    title = f'<caption style="text-align: left; padding: 4px 10px">{escape(caption)}</caption>' if caption else ""
    lines = "".join(f'<div style="padding: 1px 10px">{escape(note)}</div>' for note in notes)
    return f"<div><table>{title}<thead><tr>{heads}</tr></thead><tbody>{''.join(shown)}</tbody></table>{lines}</div>"


def facts_table(facts: Mapping[str, object], *, notes: Sequence[str] = ()) -> str:
    """A table of names and values."""
    rows = "".join(
        f"<tr>{_cell('th', name, is_number=False)}{_cell('td', value, is_number=False)}</tr>"
        for name, value in facts.items()
    )
    lines = "".join(f'<div style="padding: 1px 10px">{escape(note)}</div>' for note in notes)
    return f"<div><table><tbody>{rows}</tbody></table>{lines}</div>"


def _row(kind: str, row: Sequence[object]) -> str:
    return f"<tr>{''.join(_cell(kind, cell, is_number=isinstance(cell, int | float | None)) for cell in row)}</tr>"


def _cell(kind: str, value: object, *, is_number: bool) -> str:
    text = "?" if value is None else f"{value:,}" if isinstance(value, int | float) else str(value)
    return f'<{kind} style="{_CELL.format("right" if is_number else "left")}">{escape(text)}</{kind}>'
