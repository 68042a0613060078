"""The solvers behind ByCapability, against brute force: fewest parts for one kind, few for several, fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.solvers import few_parts
from partita.solvers.border_bytes import border_bytes, moved_for_bytes
from partita.solvers.few_parts import Steps, few_steps
from partita.solvers.relation import REFUSED, Relation, earliest_levels, latest_levels, relation


@dataclass(frozen=True)
class Graph:
    """What each unit must run behind, by data and without, and its kind."""

    reads: tuple[tuple[int, ...], ...]
    behind: tuple[tuple[int, ...], ...]
    kinds: tuple[int, ...]

    def relation(self) -> Relation:
        units = range(len(self.kinds))
        data = [(source, unit) for unit in units for source in self.reads[unit]]
        effects = [(source, unit) for unit in units for source in self.behind[unit]]
        return relation(units, units, data=data, effects=effects)

    def edges(self) -> list[tuple[int, int]]:
        units = range(len(self.kinds))
        return [(source, unit) for unit in units for source in (*self.reads[unit], *self.behind[unit])]


@st.composite
def graphs(draw: st.DrawFn, *, kinds: int, size: int = 12) -> Graph:
    count = draw(st.integers(1, size))
    chosen = draw(st.lists(st.integers(REFUSED, kinds - 1), min_size=count, max_size=count))

    def earlier() -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(sorted(draw(st.sets(st.integers(0, unit - 1), max_size=3)))) if unit else () for unit in range(count)
        )

    return Graph(earlier(), earlier() if draw(st.booleans()) else ((),) * count, tuple(chosen))


def fewest(graph: Graph) -> int:
    """The fewest steps, by trying every order of kinds; running all that can run of a kind is never worse."""
    count, edges = len(graph.kinds), graph.edges()
    behind = [[source for source, target in edges if target == unit] for unit in range(count)]

    def after(done: frozenset[int], kind: int) -> frozenset[int]:
        found = set(done)
        grown = True
        while grown:
            ready = [
                unit
                for unit in range(count)
                if unit not in found and graph.kinds[unit] == kind and found.issuperset(behind[unit])
            ]
            found.update(ready)
            grown = bool(ready)
        return frozenset(found)

    states, steps = {after(frozenset(), REFUSED)}, 0
    while not any(len(state) == count for state in states):
        kinds = set(graph.kinds) - {REFUSED}
        states = {after(after(state, kind), REFUSED) for state in states for kind in kinds}
        steps += 1
    return steps


def assert_legal(graph: Graph, steps: Steps) -> None:
    for source, target in graph.edges():
        into_part = graph.kinds[source] == REFUSED and graph.kinds[target] != REFUSED
        assert steps.levels[source] + into_part <= steps.levels[target], (source, target)
    for unit, kind in enumerate(graph.kinds):
        assert kind == REFUSED or steps.kinds[steps.levels[unit]] == kind


def one_kind(levels: Sequence[int], graph: Graph) -> Steps:
    count = max((level for level, kind in zip(levels, graph.kinds, strict=True) if kind != REFUSED), default=0)
    return Steps(list(levels), [REFUSED, *[0] * count])


@given(graphs(kinds=1))
def test_levels_are_the_fewest_parts(graph: Graph) -> None:
    early = one_kind(earliest_levels(graph.relation(), graph.kinds), graph)
    assert len(early) == fewest(graph)
    assert_legal(graph, early)


@given(graphs(kinds=1))
def test_the_latest_levels_are_legal_and_no_earlier_than_the_earliest(graph: Graph) -> None:
    early = earliest_levels(graph.relation(), graph.kinds)
    count = len(one_kind(early, graph))
    late = latest_levels(graph.relation(), graph.kinds, count)
    assert_legal(graph, Steps(late, [REFUSED, *[0] * count]))
    assert all(first <= last for first, last in zip(early, late, strict=True))


@settings(max_examples=150)
@given(graphs(kinds=3))
def test_several_kinds_take_at_most_one_part_more_than_the_fewest(graph: Graph) -> None:
    steps = few_steps(graph.relation(), graph.kinds)
    assert_legal(graph, steps)
    assert len(steps) <= fewest(graph) + 1


def test_two_chains_that_alternate_share_their_parts() -> None:
    """A by level would take a part for each chain and level, twelve in all."""
    kinds = (0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 0)
    reads = tuple(() if unit in (0, 6) else (unit - 1,) for unit in range(12))
    assert len(few_steps(Graph(reads, ((),) * 12, kinds).relation(), kinds)) == 7


@given(graphs(kinds=2, size=20), st.data())
def test_moving_for_bytes_never_worsens_its_start(graph: Graph, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(graph.kinds), max_size=len(graph.kinds)))
    between, steps = graph.relation(), few_steps(graph.relation(), graph.kinds)
    moved = moved_for_bytes(between, graph.kinds, steps, free=between.order, sizes=sizes)
    assert_legal(graph, moved)
    before = border_bytes(between, graph.kinds, steps.levels, sizes)
    assert border_bytes(between, graph.kinds, moved.levels, sizes) <= before


@pytest.mark.parametrize("readers", [3, 20])
def test_a_value_moves_to_where_it_is_read(readers: int) -> None:
    """A cheap input widened early and read late: the widening belongs to the late part, however many read it."""
    reads = ((), (0,), (1,), (0,), *[(2, 3)] * readers)
    kinds = (0, REFUSED, 0, 0, *[0] * readers)
    graph = Graph(reads, ((),) * len(kinds), kinds)
    sizes = [1, 1, 1, 100, *[1] * readers]
    early = one_kind(earliest_levels(graph.relation(), kinds), graph)
    assert early.levels[3] == 1
    moved = moved_for_bytes(graph.relation(), kinds, early, free=range(len(kinds)), sizes=sizes)
    assert moved.levels[3] == 2


def test_many_kinds_are_compared_a_few_times_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them can run at once, so that comparing them anew for every step would be quadratic."""
    compared: list[int] = []

    rank = few_parts._Schedule._rank

    def counted(schedule: few_parts._Schedule, kind: int) -> tuple[int, int, int]:
        compared.append(kind)
        return rank(schedule, kind)

    monkeypatch.setattr(few_parts._Schedule, "_rank", counted)
    between = relation(range(200), range(200), data=[], effects=[])
    assert len(few_steps(between, range(200))) == 200
    assert len(compared) < 20 * 200
