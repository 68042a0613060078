"""Parts of a part: legal, connected where asked, in an order that can run, and not larger than allowed."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

from partita.solvers.few_parts import connected_parts, cut_in_order, deep_order, kept_parts
from partita.solvers.quotient import ALONE, quotient
from partita.solvers.relation import REFUSED, Relation, earliest_levels, relation

Edges = list[tuple[int, int]]
SEEDS = pytest.mark.parametrize("seed", range(80))


def drawn(seed: int) -> tuple[Relation, Edges, Edges]:
    """Units with data and effects between them."""
    dice, count = Random(seed), 6 + seed % 10
    pairs = list(combinations(range(count), 2))
    data = [pair for pair in pairs if dice.random() < 1.5 / count]
    effects = [pair for pair in pairs if dice.random() < 1.5 / count and pair not in data]
    return relation(range(count), range(count), data=data, effects=effects), data, effects


def is_legal(parts: list[list[int]], count: int, edges: Edges) -> bool:
    owner = [ALONE] * count
    for place, part in enumerate(parts):
        for unit in part:
            owner[unit] = place
    return quotient(owner, len(parts), edges).stable_order() is not None


def is_connected(part: list[int], data: Edges) -> bool:
    found, waiting = set[int](), [part[0]]
    while waiting:
        unit = waiting.pop()
        found.add(unit)
        near = [b for a, b in data if a == unit] + [a for a, b in data if b == unit]
        waiting += [other for other in near if other in part and other not in found]
    return found == set(part)


@SEEDS
def test_what_is_kept_of_a_part_is_legal_in_the_fewest_parts(seed: int) -> None:
    between, data, effects = drawn(seed)
    kept = {unit for unit in between.order if Random(seed + unit).random() < 0.6}
    parts = kept_parts(between, between.order, kept)
    assert sorted(unit for part in parts for unit in part) == sorted(kept)
    assert is_legal(parts, len(between), [*data, *effects])
    kinds = [0 if unit in kept else REFUSED for unit in range(len(between))]
    assert len(parts) == max(
        (level for unit, level in enumerate(earliest_levels(between, kinds)) if unit in kept), default=0
    )


@SEEDS
def test_connected_parts_of_a_part_are_legal_whatever_effects_are_between_them(seed: int) -> None:
    between, data, effects = drawn(seed)
    parts = connected_parts(between, between.order)
    assert sorted(unit for part in parts for unit in part) == list(between.order)
    assert [part[0] for part in parts] == sorted(part[0] for part in parts)
    assert all(is_connected(part, data) for part in parts)
    assert is_legal(parts, len(between), [*data, *effects])


@SEEDS
def test_runs_of_the_deep_order_are_legal_parts_of_the_size_allowed(seed: int) -> None:
    between, data, effects = drawn(seed)
    order = deep_order(between, between.order)
    assert sorted(order) == list(between.order)
    sizes = {unit: 1 + unit % 3 for unit in order}
    parts = cut_in_order(order, sizes, 4)
    assert [unit for part in parts for unit in part] == order
    assert is_legal(parts, len(between), [*data, *effects])
    held = [sum(sizes[unit] for unit in part) for part in parts]
    assert max(held) <= 4
    assert all(one + sizes[after[0]] > 4 for (one, after) in zip(held, parts[1:], strict=False))


def test_the_deep_order_follows_one_chain_to_its_end_before_the_next() -> None:
    chains = [(0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 6)]
    between = relation(range(7), range(7), data=chains, effects=[])
    assert deep_order(between, range(7)) == [0, 2, 4, 1, 3, 5, 6]


def test_chains_that_effects_tie_to_each_other_are_cut_where_they_must() -> None:
    """Two chains, and each writes what the other reads."""
    data, effects = [(0, 2), (1, 3), (2, 4), (3, 5)], [(0, 1), (3, 4)]
    between = relation(range(6), range(6), data=data, effects=effects)
    parts = connected_parts(between, range(6))
    assert len(parts) == 3
    assert is_legal(parts, 6, [*data, *effects])
    assert all(one < other for one, other in pairwise(sorted(map(min, parts))))
