"""Pausing the collector: what was made in pauses is looked at in the end, and only once."""

from __future__ import annotations

import gc

import pytest

from partita._torch import gc_pause as pause_gc


@pytest.fixture(autouse=True)
def _few_may_stay_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause_gc, "_MOST_UNSEEN", 10)
    gc.collect()


def full_collections() -> int:
    return gc.get_stats()[-1]["collections"]


def make_many() -> list[list[int]]:
    with pause_gc.gc_paused():
        return [[] for _ in range(100)]


def test_what_one_pause_leaves_is_collected_at_the_end_of_the_next() -> None:
    before = full_collections()
    kept = make_many()
    assert full_collections() == before
    kept += make_many()
    assert full_collections() == before + 1


def test_what_another_collection_has_seen_is_not_collected_again() -> None:
    kept = make_many()
    gc.collect()
    before = full_collections()
    kept += make_many()
    assert full_collections() == before
