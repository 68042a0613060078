"""Solvers behind `compat`: parts that grow along the data, and the order of a graph after groups became calls."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from partita.solvers import few_parts as growing
from partita.solvers.few_parts import grown_parts
from partita.solvers.quotient import ALONE, fused_order, quotient
from partita.solvers.relation import REFUSED, Relation, relation

Edges = list[tuple[int, int]]


def drawn(seed: int, count: int) -> tuple[Relation, list[int], Edges, Edges]:
    """Units with data and effects between them, of two kinds or refused."""
    dice = Random(seed)
    pairs = list(combinations(range(count), 2))
    data = [pair for pair in pairs if dice.random() < 2 / count]
    effects = [pair for pair in pairs if dice.random() < 0.5 / count and pair not in data]
    kinds = [dice.choice([REFUSED, 0, 0, 0, 1]) for _ in range(count)]
    return relation(range(count), range(count), data=data, effects=effects), kinds, data, effects


def is_legal(owner: list[int], edges: Edges) -> bool:
    return quotient(owner, len(owner), edges).stable_order() is not None


@pytest.mark.parametrize("seed", range(60))
def test_grown_parts_are_legal_connected_and_of_one_kind(seed: int) -> None:
    between, kinds, data, effects = drawn(seed, 6 + seed % 10)
    parts = grown_parts(between, kinds)
    assert parts is not None
    owner = [ALONE if kind == REFUSED else part for part, kind in zip(parts, kinds, strict=True)]
    assert is_legal(owner, [*data, *effects])
    for part in set(owner) - {ALONE}:
        members = {unit for unit, at in enumerate(owner) if at == part}
        assert len({kinds[unit] for unit in members}) == 1
        reached, waiting = set[int](), [min(members)]
        while waiting:
            unit = waiting.pop()
            reached.add(unit)
            waiting += [b for a, b in [*data, *((b, a) for a, b in data)] if a == unit and b in members - reached]
        assert reached == members


def test_neighbours_grow_together_unless_something_is_between_them() -> None:
    chain, kinds = [(0, 1), (1, 2), (2, 3), (0, 3)], [0, 0, REFUSED, 0]
    between = relation(range(4), range(4), data=chain, effects=[])
    assert grown_parts(between, kinds) == [0, 0, 2, 3]
    assert grown_parts(between, [0, 0, 0, 0]) == [2, 2, 2, 2]


def test_growing_is_given_up_where_it_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    between, kinds, _, _ = drawn(0, 12)
    monkeypatch.setattr(growing, "_VISITS_PER_UNIT", 0)
    monkeypatch.setattr(growing, "_VISITS_ANYWAY", 0)
    assert grown_parts(between, kinds) is None


def test_a_call_takes_the_place_of_the_last_node_of_its_group() -> None:
    owner = [ALONE, 0, ALONE, 0, ALONE]
    order = fused_order(owner, [3], {}, data=[(0, 1), (1, 3), (3, 4)], effects=[], dropped=())
    assert order == [0, 2, 3, 4]


def test_what_reads_an_item_follows_it_at_once() -> None:
    owner = [0, ALONE, 0, ALONE]
    order = fused_order(owner, [2], {0: 4, 2: 5}, data=[(0, 1), (2, 3)], effects=[], dropped=())
    assert order == [2, 4, 1, 5, 3]


def test_effects_hold_for_calls_and_dropped_nodes_are_gone() -> None:
    owner = [0, ALONE, 0, ALONE, ALONE]
    order = fused_order(owner, [2], {}, data=[], effects=[(0, 1), (3, 4)], dropped={3})
    assert order == [2, 1, 4]
