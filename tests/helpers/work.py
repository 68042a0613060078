"""How much work something is, in calls that it makes: the same on any machine, under any load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def steps_during(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """How many lines of Python a call of `function` runs: rounds of loops count, which `calls_during` may miss."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        function(*args, **kwargs)
    finally:
        sys.settrace(before)
    return count


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
