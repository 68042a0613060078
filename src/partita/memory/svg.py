"""A picture of a timeline as SVG: text alone, with a light and a dark scheme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar, final

from partita.memory.budget import shown_bytes
from partita.memory.picture import Axis, described, highest_by_column, place_of_peak, shown_round
from partita.memory.timeline import Moment, Timeline

if TYPE_CHECKING:
    from partita.memory.picture import Picture

Key = TypeVar("Key")

# Classes have a prefix, since styles of an image inside a page count for the whole page.
_STYLE = """
.pm-text { font: 12px system-ui, sans-serif; fill: #1f2328; }
.pm-title { font: 600 14px system-ui, sans-serif; fill: #1f2328; }
.pm-small { font: 11px system-ui, sans-serif; fill: #59636e; }
.pm-back { fill: #ffffff; } .pm-band { fill: #818b98; fill-opacity: 0.08; }
.pm-grid { stroke: #d1d9e0; stroke-width: 1; } .pm-half { stroke: #59636e; stroke-width: 1; stroke-dasharray: 2 3; }
.pm-resident { fill: #818b98; fill-opacity: 0.25; }
.pm-plain { fill: none; stroke: #818b98; stroke-width: 1.2; }
.pm-planned { fill: #0969da; fill-opacity: 0.22; stroke: #0969da; stroke-width: 1.4; }
.pm-budget { stroke: #cf222e; stroke-width: 1.4; stroke-dasharray: 7 4; } .pm-over { fill: #cf222e; }
.pm-forward { fill: #1a7f37; } .pm-recompute { fill: #bc4c00; } .pm-backward { fill: #8250df; }
@media (prefers-color-scheme: dark) {
.pm-text, .pm-title { fill: #e6edf3; } .pm-small { fill: #9198a1; }
.pm-back { fill: #0d1117; } .pm-grid { stroke: #30363d; } .pm-half { stroke: #9198a1; }
.pm-plain { stroke: #9198a1; } .pm-planned { fill: #4493f8; stroke: #4493f8; }
.pm-budget { stroke: #f85149; } .pm-over { fill: #f85149; }
.pm-forward { fill: #3fb950; } .pm-recompute { fill: #db6d28; } .pm-backward { fill: #ab7df8; }
}
"""

_LEFT, _RIGHT, _TOP, _PLOT, _STRIP, _LINE = 78, 18, 62, 260, 10, 17
#: So many of what fills the peak are named.
_MOST_OCCUPANTS = 6


@final
@dataclass(frozen=True, slots=True)
class _Frame:
    """Where operators and bytes are in the image."""

    width: int
    operators: int
    axis: Axis

    @property
    def right(self) -> int:
        return self.width - _RIGHT

    @property
    def bottom(self) -> int:
        return _TOP + _PLOT

    def x(self, operator: float) -> float:
        return _LEFT + (self.right - _LEFT) * operator / self.operators

    def y(self, value: float) -> float:
        return self.bottom - _PLOT * self.axis.part(value)


def drawn(picture: Picture, width: int) -> str:
    """The image as a text that is a file by itself, and can be put into a page."""
    frame = _Frame(width, picture.operators, picture.axis)
    occupants = picture.planned.occupants[:_MOST_OCCUPANTS]
    height = frame.bottom + 58 + _LINE * (len(occupants) + 2)
    title = " ".join(filter(None, (picture.title, picture.headline)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img">',
        f"<title>{escaped(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="pm-back" width="{width}" height="{height}"/>',
        _text(_LEFT, 20, picture.headline, "pm-title"),
        *([_text(_LEFT, 38, picture.title, "pm-small")] if picture.title else []),
        *_bands(frame, picture.planned.moments),
        *_scale(frame),
        *_resident(frame, picture.planned),
        *([_line(frame, picture.plain.moments, "pm-plain")] if picture.plain is not None else []),
        _line(frame, picture.planned.moments, "pm-planned", closes=True),
        *_budget(frame, picture.budget_bytes),
        *_peak(frame, picture.planned),
        *_legend(frame, picture),
        *_filled(frame, picture.planned),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """A text inside of XML: no markup, and no characters that XML forbids."""
    plain = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    label = f"<title>{escaped(title)}</title>" if title else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{style}" {place}>{label}</rect>' if label else f'<rect class="{style}" {place}/>'


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _bands(frame: _Frame, moments: Sequence[Moment]) -> Iterator[str]:
    """Every other segment shaded, with its name as a tip, a strip of phases below, and where the backward begins."""
    halves = [(moment.phase == "forward", moment.segment) for moment in moments]
    for number, ((is_forward, segment), start, stop) in enumerate(_runs(halves)):
        x, wide = frame.x(start), frame.x(stop) - frame.x(start)
        most = max(moment.bytes for moment in moments[start:stop])
        tip = f"{'forward' if is_forward else 'backward'} of {segment}: up to {shown_bytes(most)}"
        style = "pm-band" if number % 2 else "pm-back"
        yield _rect(x, _TOP, wide, _PLOT, style, tip)
    for phase, start, stop in _runs([moment.phase for moment in moments]):
        wide = max(frame.x(stop) - frame.x(start), 0.5)
        yield _rect(frame.x(start), frame.bottom + 4, wide, _STRIP, f"pm-{phase}", phase)
    turn = next((at for at, (is_forward, _) in enumerate(halves) if not is_forward), None)
    if turn:
        yield _rule(frame.x(turn), _TOP, frame.x(turn), frame.bottom + 4, "pm-half")
        yield _text(frame.x(turn) - 6, frame.bottom + 30, "forward", "pm-small", "end")
        yield _text(frame.x(turn) + 6, frame.bottom + 30, "backward", "pm-small")


def _runs(keys: Sequence[Key]) -> Iterator[tuple[Key, int, int]]:
    """Equal neighbours: what they are, where they begin, and where they end."""
    for key, group in groupby(range(len(keys)), key=keys.__getitem__):
        members = list(group)
        yield key, members[0], members[-1] + 1


def _scale(frame: _Frame) -> Iterator[str]:
    for mark in frame.axis.marks():
        yield _rule(_LEFT, frame.y(mark), frame.right, frame.y(mark), "pm-grid")
        yield _text(_LEFT - 8, frame.y(mark) + 4, shown_round(mark), "pm-small", "end")


def _resident(frame: _Frame, timeline: Timeline) -> Iterator[str]:
    top = frame.y(timeline.resident_bytes)
    if timeline.resident_bytes and top < frame.bottom:
        tip = f"allocated throughout: {shown_bytes(timeline.resident_bytes)}"
        yield _rect(_LEFT, top, frame.right - _LEFT, frame.bottom - top, "pm-resident", tip)


def _line(frame: _Frame, moments: Sequence[Moment], style: str, *, closes: bool = False) -> str:
    """The bytes as steps; of more operators than pixels, the highest in each."""
    columns = min(frame.operators, frame.right - _LEFT)
    heights = highest_by_column(moments, columns, frame.operators)
    if not heights:
        return ""
    steps = [f"M{_LEFT:.1f} {frame.y(heights[0]):.1f}"]
    for column in range(1, len(heights) + 1):
        turn = f"V{frame.y(heights[column]):.1f}" if column < len(heights) else ""
        steps.append(f"H{frame.x(column * frame.operators / columns):.1f}{turn}")
    ends = f"V{frame.bottom:.1f}H{_LEFT:.1f}Z" if closes else ""
    return f'<path class="{style}" d="{"".join(steps)}{ends}"/>'


def _budget(frame: _Frame, budget: int | None) -> Iterator[str]:
    if budget is not None and frame.axis.low <= budget <= frame.axis.high:
        y = frame.y(budget)
        yield _rule(_LEFT, y, frame.right, y, "pm-budget")
        yield _text(_LEFT + 6, y - 5, f"budget {shown_bytes(budget)}", "pm-small")


def _peak(frame: _Frame, timeline: Timeline) -> Iterator[str]:
    if not timeline.moments:
        return
    at = place_of_peak(timeline)
    moment = timeline.moments[at]
    x, y = frame.x(at + 0.5), frame.y(moment.bytes)
    tip = f"<title>{escaped(described(moment))}</title>"
    yield f'<circle class="pm-over" cx="{x:.1f}" cy="{y:.1f}" r="4">{tip}</circle>'
    yield _rule(x, _TOP - 4, x, y, "pm-half")
    is_left = x < (frame.right + _LEFT) / 2
    label = f"{shown_bytes(moment.bytes)}, {described(moment)}"
    yield _text(x, _TOP - 8, label, "pm-text", "start" if is_left else "end")


def _legend(frame: _Frame, picture: Picture) -> Iterator[str]:
    y = frame.bottom + 42
    entries = [("pm-planned", "planned")]
    if picture.planned.resident_bytes:
        entries.append(("pm-resident", "allocated throughout"))
    if picture.plain is not None:
        entries.append(("pm-plain", picture.plain_name))
    phases = dict.fromkeys(moment.phase for moment in picture.planned.moments)
    entries += [(f"pm-{phase}", phase) for phase in phases]
    x = float(_LEFT)
    for style, name in entries:
        yield _rect(x, y, 14, 9, style)
        yield _text(x + 19, y + 9, name, "pm-small")
        x += 34 + 6.2 * len(name)


def _filled(frame: _Frame, timeline: Timeline) -> Iterator[str]:
    """What is allocated at the peak, largest first."""
    y = frame.bottom + 74
    known = {"throughout": timeline.resident_bytes, "of gradients and results": timeline.gradient_bytes}
    label = "".join(f" {shown_bytes(size)} {what}," for what, size in known.items() if size)
    yield _text(_LEFT, y, f"at the peak:{label}{' and' if label else ''}", "pm-small")
    for number, occupant in enumerate(timeline.occupants[:_MOST_OCCUPANTS], 1):
        yield _text(_LEFT, y + _LINE * number, str(occupant), "pm-text")
