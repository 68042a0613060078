"""How Sphinx builds the site from these pages: `make site`."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from sphinx.application import Sphinx

import partita

ROOT = Path(__file__).resolve().parents[1]

project = "Partita"
author = project_copyright = "The Partita authors"
version = release = partita.__version__

# Sphinx reads the comments on fields itself; it would list those without one as well.
del type(partita.Plan).__slots__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["conf.py"]
nitpicky = True
# Names of torch, of other packages and of type variables in signatures: their documents are elsewhere.
nitpick_ignore_regex = [(r"py:.*", r".*")]

# Anchors of headings are those of GitHub, so that links work in both places.
myst_heading_anchors = 4
# "Every code block is valid in its language" is what the tests check, by running them.
suppress_warnings = ["misc.highlighting_failure"]

# A docstring is plain text for help(); in it `name` is code, and a paragraph that ends in :: begins an example.
default_role = "code"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_title = f"Partita {version}"
html_copy_source = False
html_show_sphinx = False

# Files of the repository that are pages of the site as well, so that there is one copy of them.
_PAGES_OF_FILES = {
    "contributing": "CONTRIBUTING.md",
    "reference/changelog": "CHANGELOG.md",
    "reference/figures": "benchmarks/README.md",
}
_LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")


def setup(app: Sphinx) -> None:
    """Reads the pages above from their files."""
    app.connect("source-read", _read_page)


def _read_page(app: Sphinx, page: str, content: list[str]) -> None:
    source = _PAGES_OF_FILES.get(page, f"docs/{page}.md")
    text = (ROOT / source).read_text(encoding="utf-8")
    content[0] = _LINK.sub(lambda link: _link_from(page, source, link), text)


def _link_from(page: str, source: str, link: re.Match[str]) -> str:
    """A link of the file `source`, as the site's page `page` has to write it."""
    linked = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
    if not (ROOT / linked).exists():
        return link[0]  # It is no link, or a broken one, which Sphinx reports.
    if (ROOT / linked).is_dir():
        return link["text"]  # The site has pages and files, and no folders.
    pages = {file: f"docs/{name}.md" for name, file in _PAGES_OF_FILES.items()} | {"README.md": "docs/index.md"}
    there = posixpath.relpath(pages.get(linked, linked), posixpath.dirname(f"docs/{page}.md"))
    return f"[{link['text']}]({there}{link['anchor'] or ''})"
