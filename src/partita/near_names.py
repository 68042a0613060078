"""Suggestions for a name that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

#: Longer names are compared with none: of two names with the same few letters, `difflib` takes a time that grows like
#: the third power of their length.
_LONGEST = 100
#: A bound on the pairs of letters that are compared: names of a program and of a plan may come from files.
_MOST_PAIRS = 20_000_000


def near_names(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """Up to three known names that are spelled almost like this one, at bounded cost; none if it is too long."""
    if not 0 < len(name) <= _LONGEST:
        return []
    short = (one for one in known if len(one) <= _LONGEST)
    return get_close_matches(name, list(islice(short, _MOST_PAIRS // len(name) ** 2)), n=3, cutoff=cutoff)
