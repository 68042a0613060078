"""A report on a plan: what is cut where and why, with what it costs and whether it was verified."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal, Protocol, final, runtime_checkable

from partita._html import html_facts
from partita._plain_help import PlainHelp
from partita._torch.gc_pause import gc_paused
from partita.equivalence import Comparison
from partita.errors import OptionError
from partita.memory import Picture, Timeline
from partita.plans import Plan
from partita.reports.data import report_data
from partita.reports.formats import dot, json_text, model_explorer, trace
from partita.reports.page import page
from partita.whole_files import whole_file

#: What `Report.save` writes.
Format = Literal["html", "json", "dot", "model_explorer", "trace"]

_BY_SUFFIX: dict[str, Format] = {
    ".html": "html",
    ".htm": "html",
    ".trace.json": "trace",
    ".json": "json",
    ".dot": "dot",
    ".gv": "dot",
}
_FORMATS: tuple[Format, ...] = ("html", "json", "dot", "model_explorer", "trace")

#: A notebook keeps what it shows; a larger report is better a file of its own.
_LARGEST_SHOWN = 4_000_000


@runtime_checkable
class HasPicture(Protocol):
    """A memory plan, eager or compiled."""

    def picture(self) -> Picture:
        """Its timeline, before and after."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class Report(metaclass=PlainHelp):
    """A plan to look at: `html()` is a page that needs no server and no network, `data()` all that it shows.

    `save(path)` writes either, or a graph for Graphviz, by the suffix of the path. A notebook shows the page.
    """

    #: What was reported, as JSON: a report stays as it was made.
    text: str = field(repr=False)
    title: str

    def data(self) -> dict[str, Any]:
        """What the report shows, of plain types only; `version` changes when the form of the data does."""
        found: dict[str, Any] = json.loads(self.text)
        return found

    def html(self) -> str:
        """The page: one file with its data, script and styles inside."""
        return page(self.text, f"{self.title}: Partita report")

    def dot(self) -> str:
        """The graph for Graphviz, with a cluster for each region."""
        return dot(self.data())

    def model_explorer(self, by: str = "region") -> dict[str, Any]:
        """Node data for Model Explorer, by region, treatment, body, mode, flops or bytes."""
        return model_explorer(self.data(), by)

    def trace(self) -> dict[str, Any]:
        """The memory timeline as a Chrome trace, which Perfetto opens; needs `memory`."""
        return trace(self.data())

    def save(self, path: str | os.PathLike[str], *, format: Format | None = None) -> None:
        """Writes a file, whole or not at all, of the kind that its name ends in: .html, .trace.json, .json or .dot.

        Node data for Model Explorer are JSON as well, and are named by `format`: "model_explorer".
        """
        place = Path(os.fspath(path))
        content = self._content(_format_of(place, format))
        with whole_file(place) as draft:
            draft.write_text(content, encoding="utf-8", newline="\n")

    def _content(self, format: Format) -> str:
        match format:
            case "html":
                return self.html()
            case "json":
                return self.text
            case "dot":
                return self.dot()
            case "model_explorer":
                return json_text(self.model_explorer())
            case "trace":
                return json_text(self.trace())

    def _repr_html_(self) -> str:
        """The page in a frame; of a large report, what it is about."""
        if len(self.text) > _LARGEST_SHOWN:
            facts = {"report": self.title, "size": f"{len(self.text) / 1e6:.0f} MB", "to see it": 'save("report.html")'}
            return html_facts(facts)
        frame = 'sandbox="allow-scripts" width="100%" height="720" style="border: 1px solid #8884; border-radius: 6px"'
        return f'<iframe {frame} title="Partita report" srcdoc="{escape(self.html())}"></iframe>'

    def __repr__(self) -> str:
        return f"Report({self.title!r}, {len(self.text):,} bytes of data)"


@gc_paused()
def report(
    plan: Plan, *, comparison: Comparison | None = None, memory: HasPicture | Picture | Timeline | None = None
) -> Report:
    """The report on a plan as it is now, with what was compiled and what failed so far.

    `comparison` is what `partita.compare` or `verify` returned; `memory` a memory plan, its picture or a timeline. The
    time is linear in the nodes.
    """
    if not isinstance(plan, Plan):
        hint = "; its plan is in the attribute `plan`" if isinstance(getattr(plan, "plan", None), Plan) else ""
        raise OptionError(f"a report is on a Plan, as partita.plan makes it, not on a {type(plan).__name__}{hint}")
    if comparison is not None and not isinstance(comparison, Comparison):
        raise OptionError(
            f"`comparison` is what partita.compare or partita.verify returns, not a {type(comparison).__name__}"
        )
    data = report_data(plan, comparison, _picture(memory))
    return Report(json_text(data), data["title"])


def _picture(memory: object) -> Picture | None:
    match memory:
        case None | Picture():
            return memory
        case Timeline():
            return Picture(memory)
        case HasPicture():
            return memory.picture()
    raise OptionError(
        f"`memory` is a memory plan (from partita.fit, in the attribute memory_plan), its picture() or its timeline, "
        f"not a {type(memory).__name__}"
    )


def _format_of(path: Path, format: object) -> Format:
    if format is not None:
        for known in _FORMATS:
            if format == known:
                return known
        raise OptionError(f"a report is saved in the format {', '.join(map(repr, _FORMATS))}, not {format!r}")
    found = _BY_SUFFIX.get("".join(path.suffixes[-2:]).lower()) or _BY_SUFFIX.get(path.suffix.lower())
    if found is None:
        raise OptionError(
            f"a report is saved as {', '.join(_BY_SUFFIX)}, not as {path.name!r}; for other names say "
            f"format=, one of {', '.join(map(repr, _FORMATS))}"
        )
    return found
