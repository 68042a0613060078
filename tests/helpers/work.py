"""How much work something is, in calls that it makes: the same on any machine, under any load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_during(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """How many functions a call of `function` calls, those that are written in C among them."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function(*args, **kwargs)
    finally:
        sys.setprofile(before)
    return count
