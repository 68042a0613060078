"""The documents build as a site, and Sphinx warns of nothing: no broken link, no page outside of the navigation."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: One page for each package, made of docstrings.
NAMES = ROOT / "docs" / "reference" / "api"
PAGES_OF_NAMES = (
    *("partita", "partita.backends", "partita.equivalence", "partita.errors", "partita.hops", "partita.memory"),
    *("partita.plans", "partita.policies", "partita.recompute", "partita.testing", "partita.torch_compile"),
    "partita.treatments",
)

pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install '.[docs]'")
pytest.importorskip("myst_parser", reason="MyST is not installed: pip install '.[docs]'")
pytest.importorskip("furo", reason="furo is not installed: pip install '.[docs]'")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    build = subprocess.run(
        [*command, "-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    assert (tmp_path / "site" / "index.html").exists()


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#([^)\s]+))?\)", text)
    assert len(links) > 20
    assert [path for path, _ in links if not (ROOT / path).exists()] == []
    assert [f"{path}#{anchor}" for path, anchor in links if anchor and anchor not in _anchors(ROOT / path)] == []


def _anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("package", PAGES_OF_NAMES)
def test_a_page_has_every_public_name_of_its_package(package: str) -> None:
    page = NAMES / f"{package.rpartition('.')[2]}.md"
    text = page.read_text(encoding="utf-8")
    # All members are on the page but for those that are excluded, which the text says where to find.
    excluded = set(re.findall(r":exclude-members: (.*)", text)[0].split(", ")) if ":exclude-members:" in text else set()
    written = re.sub(r":exclude-members: .*", "", text)
    wanted = set(importlib.import_module(package).__all__)
    if f".. automodule:: {package}\n   :members:" in text:
        wanted &= excluded
    assert {name for name in wanted if not re.search(rf"\b{name}\b", written)} == set()
