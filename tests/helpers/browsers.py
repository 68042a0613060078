"""Which browser opens the pages of reports, and what is said where there is none."""

from __future__ import annotations

import os
import shutil

NO_BROWSER = "no Chromium to open reports with: install it, or name it in the variable PARTITA_CHROMIUM"

#: Names under which systems install it.
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The path of Chromium, if there is one."""
    return os.environ.get("PARTITA_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
