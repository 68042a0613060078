"""A real browser for the pages of reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.browsers import NO_BROWSER, chromium

from partita import Report

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Opener:
    """Opens reports from files in one page, and notes what the browser says and requests besides."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.folder = Path()
        self.complaints: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        page.on("request", self._note_request)

    def __call__(self, report: Report, *, width: int = 1280, height: int = 800, color_scheme: str = "light") -> Any:
        report.save(self.folder / "report.html")
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme=color_scheme, media="screen")
        self.page.goto((self.folder / "report.html").as_uri())
        # The policy of the page forbids the `eval` that playwright's own waiting is made of.
        self.page.evaluate(
            "async () => { while (!window.partita.view.wasShown) await new Promise(requestAnimationFrame); }"
        )
        return self.page

    def _note_request(self, request: Any) -> None:
        if request.url != (self.folder / "report.html").as_uri():
            self.complaints.append(f"request: {request.url}")


@pytest.fixture(scope="module")
def _opener() -> Iterator[Opener]:
    """One browser for a module: while its driver runs, a thread has an event loop, which others may want as well."""
    driver = pytest.importorskip("playwright.sync_api", reason="the package playwright, of the extra `dev`, is missing")
    program = chromium()
    if program is None:
        pytest.skip(NO_BROWSER)
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_FLAGS))
        yield Opener(browser.new_page())
        browser.close()


@pytest.fixture
def open_report(_opener: Opener, tmp_path: Path) -> Iterator[Opener]:
    """Opens a report; at the end of a test, there are no complaints and no requests."""
    _opener.folder = tmp_path
    yield _opener
    complaints = list(_opener.complaints)
    _opener.complaints.clear()
    assert complaints == []
