"""Suggestions for names that are not there."""

from __future__ import annotations

import difflib
from typing import Any

import pytest

from partita.near_names import near_names


def test_names_that_are_spelled_alike_are_suggested() -> None:
    assert near_names("liner", ["linear", "relu", "linear_1"]) == ["linear", "linear_1"]
    assert near_names("softmax", ["relu"]) == []
    assert near_names("", [""]) == []


def test_long_names_are_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of half a megabyte for a program of three thousand such names took minutes to be refused."""

    def ratio(_: Any) -> float:
        pytest.fail("two long names are compared")

    monkeypatch.setattr(difflib.SequenceMatcher, "ratio", ratio)
    assert near_names("a" * 95 + "b" * 95, ["ab" * 95] * 3_000) == []
    assert near_names("a" * 1_000_000, ["a"]) == []
    assert near_names("ab" * 30, ["ba" * 95]) == []
