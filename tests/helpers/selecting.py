"""Which variants of a test run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(variants: Iterable[Any], *quick: Any) -> list[Any]:
    """All variants, of which only the quick ones run by default; `make test-all` runs every one.

    A tuple is a variant of several arguments.
    """
    return [each if each in quick else _slow(each) for each in variants]


def _slow(variant: Any) -> Any:
    return pytest.param(*(variant if isinstance(variant, tuple) else (variant,)), marks=pytest.mark.slow)
