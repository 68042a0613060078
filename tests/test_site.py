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


def test_the_site_builds_without_a_warning_and_has_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    build = subprocess.run(
        [*command, "-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    assert (tmp_path / "site" / "index.html").exists()
    assert {package: _missing_names(package, tmp_path / "site") for package in PAGES_OF_NAMES} == {
        package: [] for package in PAGES_OF_NAMES
    }


def _missing_names(package: str, site: Path) -> list[str]:
    """The public names that have no entry on the page of their package, and that its text does not mention."""
    page = NAMES / f"{package.rpartition('.')[2]}.md"
    built = (site / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text(encoding="utf-8")
    text = re.sub(r"```\{eval-rst\}.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: list[str] = importlib.import_module(package).__all__
    return [name for name in names if f'id="{package}.{name}"' not in built and f"{name}`" not in text]


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
