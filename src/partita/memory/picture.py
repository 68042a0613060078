"""The timeline of a step before and after planning, to look at: in a terminal, as data, as SVG and as PNG."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import floor, log10
from os import PathLike, fspath
from pathlib import Path
from typing import Any, final

from partita.errors import OptionError
from partita.memory.budget import shown_bytes
from partita.memory.timeline import Moment, Timeline
from partita.whole_files import whole_file


@final
@dataclass(frozen=True)
class Picture:
    """Bytes over the operators of a step, planned and without recomputation; prints as a chart in text.

    `svg()` is an image that follows the light or dark scheme of the viewer, `png()` one of fixed colours,
    `data()` the numbers, and `save(path)` writes any of them; a notebook shows the image.
    """

    planned: Timeline
    plain: Timeline | None = None
    budget_bytes: int | None = None
    title: str = ""
    #: What the plain timeline is of.
    plain_name: str = "without recomputation"

    def data(self) -> dict[str, Any]:
        """The numbers, of plain types only: budget, peaks, what fills them, and a row for each operator."""
        return {
            "title": self.title,
            "budget_bytes": self.budget_bytes,
            "planned": timeline_data(self.planned, moments=self.planned.rows()),
            "plain": None if self.plain is None else timeline_data(self.plain, moments=self.plain.rows()),
        }

    def svg(self, width: int = 960) -> str:
        """The picture as SVG, that many pixels wide."""
        from partita.memory.svg import drawn

        return drawn(self, _checked_size("width", width, 720))

    def png(self, width: int = 960) -> bytes:
        """The picture as PNG, that many pixels wide; needs matplotlib, the extra `pictures`."""
        from partita.memory.png import drawn

        return drawn(self, _checked_size("width", width, 720))

    def text(self, width: int | None = None, height: int = 12) -> str:
        """The picture in characters; as wide as the terminal, but at most 120 columns, if no width is said."""
        if width is None:
            width = min(max(shutil.get_terminal_size((100, 24)).columns, _LEAST_WIDTH), 120)
        lines = _lines(self, _checked_size("width", width, _LEAST_WIDTH), _checked_size("height", height, 3))
        return "\n".join(line.rstrip() for line in lines)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a file of the kind that its name ends in: .svg, .png, .txt or .json."""
        target = Path(fspath(path))
        match target.suffix.lower():
            case ".svg":
                content = self.svg().encode()
            case ".png":
                content = self.png()
            case ".txt":
                content = f"{self.text(100)}\n".encode()
            case ".json":
                content = json.dumps(self.data()).encode()
            case _:
                raise OptionError(f"a picture is saved as .svg, .png, .txt or .json, not as {target.name!r}")
        with whole_file(target) as draft:
            draft.write_bytes(content)

    def __str__(self) -> str:
        return self.text()

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return self.svg()

    @cached_property
    def axis(self) -> Axis:
        """The scale of bytes, which has room for the budget if that is not far above."""
        highest = max(one.peak_bytes for one in self.timelines)
        budget = self.budget_bytes
        shows = budget is not None and budget <= _BUDGET_SHOWN * highest
        resident = min(one.resident_bytes for one in self.timelines)
        most = max(highest, budget) if budget is not None and shows else highest
        low = 0 if resident < _MOST_RESIDENT * most else resident
        return Axis.around(low, most)

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """What is drawn, the plan first."""
        return (self.planned,) if self.plain is None else (self.planned, self.plain)

    @property
    def operators(self) -> int:
        """The length of the longest timeline, at least one."""
        return max(1, *(len(one.moments) for one in self.timelines))

    @property
    def headline(self) -> str:
        """The peaks in one line."""
        allowed = "" if self.budget_bytes is None else f" of {shown_bytes(self.budget_bytes)} allowed"
        plain = "" if self.plain is None else f"; {self.plain_name} {shown_bytes(self.plain.peak_bytes)}"
        return f"peak {shown_bytes(self.planned.peak_bytes)}{allowed}{plain}"


#: A budget up to so many times the peak is part of the chart.
_BUDGET_SHOWN = 1.3
#: If more of the peak than this is allocated throughout, the scale does not begin at zero.
_MOST_RESIDENT = 0.6
_LEAST_WIDTH = 40


@final
@dataclass(frozen=True, slots=True)
class Axis:
    """A scale of bytes with round marks."""

    low: int
    high: int
    step: int

    @classmethod
    def around(cls, low: int, most: int) -> Axis:
        """A scale from a round number at or below `low` to one at or above `most`, with at most six steps."""
        rough = max((most - low) / 5, 1)
        power = 10 ** floor(log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        low = low // step * step
        return cls(low, max(-(-most // step) * step, low + step), step)

    def marks(self) -> list[int]:
        """The round numbers, lowest first."""
        return list(range(self.low, self.high + 1, self.step))

    def part(self, value: float) -> float:
        """Where a number lies, from 0 at the lower end to 1 at the upper."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def highest_by_column(moments: Sequence[Moment], columns: int, operators: int) -> list[int]:
    """For each of the columns that `operators` are drawn in, the most bytes of those in it; as far as moments go.

    With more columns than operators, an operator fills several.
    """
    found: list[int] = []
    for column in range(columns):
        start = column * operators // columns
        stop = max((column + 1) * operators // columns, start + 1)
        inside = moments[start:stop]
        if not inside:
            break
        found.append(max(moment.bytes for moment in inside))
    return found


def place_of_peak(timeline: Timeline) -> int:
    """The number of the operator at which most is allocated."""
    return max(range(len(timeline.moments)), key=lambda at: timeline.moments[at].bytes, default=0)


def described(moment: Moment) -> str:
    """When a moment is: its phase, its segment, and the node with its module."""
    where = f" in {moment.path}" if moment.path else ""
    return f"{moment.phase} of {moment.segment}: {moment.node or moment.operator}{where}"


def _checked_size(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"the {name} of a picture is a whole number of at least {least}, not {value!r}")
    return value


def timeline_data(timeline: Timeline, *, moments: object) -> dict[str, Any]:
    """A timeline as plain values, with its moments in any form."""
    return {
        "peak_bytes": timeline.peak_bytes,
        "peak_at": place_of_peak(timeline),
        "resident_bytes": timeline.resident_bytes,
        "gradient_bytes": timeline.gradient_bytes,
        "occupants": [asdict(one) for one in timeline.occupants],
        "moments": moments,
    }


# In characters.

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_SIGNS = {"forward": ">", "recompute": "↻", "backward": "<"}


def _lines(picture: Picture, width: int, height: int) -> Iterator[str]:
    axis, operators = picture.axis, picture.operators
    # A row begins at its label; the last one is for the upper end of the scale.
    labels, rows = [""] * height, height - 1
    for mark in axis.marks():
        labels[int(axis.part(mark) * rows)] = shown_round(mark)
    margin = max(map(len, labels))
    columns = width - margin - 2
    planned = highest_by_column(picture.planned.moments, columns, operators)
    plain = highest_by_column(picture.plain.moments, columns, operators) if picture.plain is not None else []
    budget = None if picture.budget_bytes is None or picture.budget_bytes > axis.high else picture.budget_bytes
    line = -1 if budget is None else int(axis.part(budget) * rows)
    yield from filter(None, (_printable(picture.title), picture.headline))
    for row in reversed(range(height)):
        cells = (_cell(axis, rows, row, planned[at : at + 1], plain[at : at + 1]) for at in range(columns))
        drawn = "".join("╌" if row == line and cell in " ░" else cell for cell in cells)
        yield f"{labels[row]:{margin}} {'┤' if labels[row] else '│'}{drawn}"
    signs = (picture.planned.moments[at * operators // columns] for at in range(len(planned)))
    yield f"{'':{margin}}  {''.join(_SIGNS[moment.phase] for moment in signs)}"
    if picture.planned.moments:
        yield _mark_of_peak(picture.planned, margin, columns, operators)
    used = [_SIGNS[phase] + " " + phase for phase in _SIGNS if any(m.phase == phase for m in picture.planned.moments)]
    lines = ["█ planned", *([f"░ {picture.plain_name}"] if plain else []), *(["╌ budget"] if line >= 0 else []), *used]
    yield "  ".join(lines)


def _cell(axis: Axis, rows: int, row: int, planned: Sequence[int], plain: Sequence[int]) -> str:
    """One character of the chart: eighths of the plan, or a shade where only the plain step reaches."""
    filled = [axis.part(value) * rows - row for value in planned]
    eighths = round(8 * min(max(filled[0], 0), 1)) if filled else 0
    if eighths:
        return _EIGHTHS[eighths]
    return "░" if any(axis.part(value) * rows - row >= 0.5 for value in plain) else " "


def _mark_of_peak(timeline: Timeline, margin: int, columns: int, operators: int) -> str:
    place = place_of_peak(timeline)
    at = min(columns - 1, place * columns // operators)
    label = _printable(described(timeline.moments[place]))
    if at + 2 + len(label) <= columns or len(label) + 1 > at:
        return f"{'':{margin + 2 + at}}▲ {label}"
    return f"{'':{margin + 2 + at - len(label) - 1}}{label} ▲"


def shown_round(number: int) -> str:
    """A round number of bytes for people, in powers of 1000."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= factor:
            return f"{number / factor:.10g} {unit}"
    return f"{number} B"


def _printable(text: str) -> str:
    """A name without line breaks and control characters, which would break the chart."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
