"""Which variants of a test run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(variants: Iterable[Any], *quick: Any) -> list[Any]:
    """All variants, of which only the quick ones run by default; `make test-all` runs every one."""
    return [each if each in quick else pytest.param(each, marks=pytest.mark.slow) for each in variants]
