"""The page of a report: one HTML file with its script, its styles and its data inside, which reaches nothing else."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template

#: The parts of the script in the order in which they are put together.
_SCRIPTS = (
    *("data.js", "layout.js", "tree.js", "overlays.js", "arrangement.js", "painting.js", "graph.js"),
    *("tables.js", "timeline.js", "details.js", "panels.js", "search.js", "report.js"),
)


def page(json_text: str, title: str) -> str:
    """The page that shows the data of `json_text`."""
    script, style = _script(), asset("report.css")
    return Template(asset("page.html")).substitute(
        policy=_policy(script, style), title=escape(title), style=style, data=embedded(json_text), script=script
    )


def embedded(json_text: str) -> str:
    """JSON as it can stand inside a script element: no text in it ends that element or begins a comment."""
    return json_text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def asset(name: str) -> str:
    """The text of a file beside this module."""
    return files("partita.reports").joinpath("assets", name).read_text(encoding="utf-8")


def _script() -> str:
    parts = "\n".join(map(asset, _SCRIPTS))
    return f'"use strict";\n(() => {{\n{parts}\n}})();\n'


def _policy(script: str, style: str) -> str:
    """Nothing is loaded, and only the script and the styles of this page are used, by their hashes."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
