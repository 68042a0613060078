"""Neighbours: for each node, by number, those right before it and right after it along some edges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

__all__ = ["Neighbours", "neighbours_of"]


@final
@dataclass(frozen=True, slots=True)
class Neighbours:
    """The nodes before and after each node; a node that has none is missing."""

    before: Mapping[int, Sequence[int]]
    after: Mapping[int, Sequence[int]]


def neighbours_of(edges: Iterable[tuple[int, int]]) -> Neighbours:
    """The neighbours along edges from a node to one after it, in the order of the edges."""
    before: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for source, target in edges:
        before.setdefault(target, []).append(source)
        after.setdefault(source, []).append(target)
    return Neighbours(before, after)
