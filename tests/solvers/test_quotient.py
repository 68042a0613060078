"""The quotient: its order is the earliest legal one, its cycles are real and short, and it knows legal from illegal."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.solvers.quotient import ALONE, NOWHERE, Quotient, quotient

Edges = list[tuple[int, int]]


@st.composite
def cuts(draw: st.DrawFn, nodes: int = 7, groups: int = 3) -> tuple[list[int], int, Edges]:
    """An owner for each node and edges that point forward, as in a graph."""
    count = draw(st.integers(1, nodes))
    owner = draw(st.lists(st.integers(NOWHERE, groups - 1), min_size=count, max_size=count))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    return owner, groups, draw(st.lists(st.sampled_from(pairs), unique=True) if pairs else st.just([]))


def vertices_of(owner: list[int], groups: int) -> list[int | None]:
    """The vertex of each node, written down a second time."""
    return [None if at == NOWHERE else groups + number if at == ALONE else at for number, at in enumerate(owner)]


def edges_of(owner: list[int], groups: int, edges: Edges) -> set[tuple[int, int]]:
    vertex = vertices_of(owner, groups)
    pairs = {(vertex[a], vertex[b]) for a, b in edges}
    return {(a, b) for a, b in pairs if a is not None and b is not None and a != b}


def obeys(order: tuple[int, ...], edges: set[tuple[int, int]]) -> bool:
    return all(order.index(a) < order.index(b) for a, b in edges)


@given(cuts())
@settings(max_examples=300)
def test_the_stable_order_is_the_best_of_all_legal_orders(cut: tuple[list[int], int, Edges]) -> None:
    owner, groups, edges = cut
    found = quotient(owner, groups, edges)
    vertex = vertices_of(owner, groups)
    first = {v: vertex.index(v) for v in vertex if v is not None}
    wanted = edges_of(owner, groups, edges)
    assert found.first == first
    by_first = sorted(first, key=first.__getitem__)
    # Permutations come in lexical order, so the first legal one has the earliest vertex at every place.
    legal = next((order for order in permutations(by_first) if obeys(order, wanted)), None)
    assert found.stable_order() == (None if legal is None else list(legal))


@given(cuts())
@settings(max_examples=300)
def test_every_edge_has_a_cause_that_lies_in_its_ends(cut: tuple[list[int], int, Edges]) -> None:
    owner, groups, edges = cut
    found, vertex = quotient(owner, groups, edges), vertices_of(owner, groups)
    assert set(found.causes) == edges_of(owner, groups, edges)
    for (source, target), (before, after) in found.causes.items():
        assert (before, after) in edges
        assert (vertex[before], vertex[after]) == (source, target)


def shortest_length(vertices: set[int], edges: set[tuple[int, int]]) -> int:
    """The length of the shortest cycle, by powers of the adjacency relation."""
    walks = set(edges)
    for length in range(1, len(vertices) + 1):
        if any(a == b for a, b in walks):
            return length
        walks = {(a, d) for a, b in walks for c, d in edges if b == c}
    raise AssertionError("no cycle")


@given(st.integers(0, 2**32), st.integers(2, 12), st.integers(1, 4))
@settings(max_examples=300)
def test_the_shortest_cycle_is_a_cycle_and_none_is_shorter(seed: int, count: int, groups: int) -> None:
    source = Random(seed)
    owner = [source.randrange(-1, groups) for _ in range(count)]
    edges = [(a, b) for b in range(count) for a in range(b) if source.random() < 0.4]
    found = quotient(owner, groups, edges)
    if found.stable_order() is not None:
        return
    cycle = found.shortest_cycle()
    assert all(edge in found.causes for edge in cycle)
    assert [b for _, b in cycle] == [a for a, _ in cycle[1:]] + [cycle[0][0]]
    assert len({a for a, _ in cycle}) == len(cycle)
    assert len(cycle) == shortest_length(set(found.first), set(found.causes))


def chain_between_two_cycles(length: int) -> Quotient:
    """Groups 0 to `length` - 1 in a row, from a cycle of two groups to another one."""
    edges = [(length, length + 1), (length + 1, length), (length + 2, length + 3), (length + 3, length + 2)]
    edges += [(length, 0), (length - 1, length + 2), *((at, at + 1) for at in range(length - 1))]
    groups = length + 4
    return Quotient(groups, {at: at for at in range(groups)}, dict.fromkeys(edges, (0, 0)))


@pytest.mark.parametrize("length", [3, 40])
def test_a_cycle_is_found_beside_a_long_way_between_two_cycles(length: int) -> None:
    found = chain_between_two_cycles(length)
    assert found.stable_order() is None
    assert sorted(found.shortest_cycle()) in (
        [(length, length + 1), (length + 1, length)],
        [(length + 2, length + 3), (length + 3, length + 2)],
    )


def test_nodes_that_are_nowhere_order_nothing() -> None:
    found = quotient([0, NOWHERE, 1, 0], 2, [(0, 1), (1, 2), (2, 3)])
    assert found.causes == {(1, 0): (2, 3)}
    assert found.stable_order() == [1, 0]


def test_a_group_waits_for_a_node_between_its_own() -> None:
    found = quotient([0, ALONE, 0], 1, [(0, 1), (1, 2)])
    assert found.stable_order() is None
    assert sorted(found.shortest_cycle()) == [(0, 2), (2, 0)]
    assert found.causes == {(0, 2): (0, 1), (2, 0): (1, 2)}
