"""Levels: the fewest parts for nodes that one backend accepts or refuses, in one pass.

The level of a node is the number of parts on the longest path that ends in it: a path needs a new part wherever it
comes from a refused node to an accepted one. Levels never fall along an edge, and rise from refused to accepted, so
the accepted nodes of one level can run in one call, after those of the level before. A path with k such places needs k
parts in any partition, so there is no smaller number.
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.solvers.relation import Relation

__all__ = ["REFUSED", "earliest_levels", "latest_levels"]

#: The kind of a unit that no part may hold.
REFUSED = -1


def earliest_levels(relation: Relation, kinds: Sequence[int]) -> list[int]:
    """The lowest level of each unit; a refused unit runs after the part of its level."""
    levels = [0] * len(relation)
    behind = relation.behind
    for unit in relation.order:
        is_refused = kinds[unit] == REFUSED
        level = 0 if is_refused else 1
        for source in behind[unit]:
            reached = levels[source]
            if reached >= level:
                level = reached if is_refused or kinds[source] != REFUSED else reached + 1
        levels[unit] = level
    return levels


def latest_levels(relation: Relation, kinds: Sequence[int], highest: int) -> list[int]:
    """The highest level of each unit if there are `highest` parts."""
    levels = [highest] * len(relation)
    before = relation.before
    for unit in reversed(relation.order):
        is_refused = kinds[unit] == REFUSED
        level = highest
        for target in before[unit]:
            allowed = levels[target]
            if allowed <= level:
                level = allowed - 1 if is_refused and kinds[target] != REFUSED else allowed
        levels[unit] = level
    return levels
