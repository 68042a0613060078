"""Plans for steps of several graphs, from numbers alone: each fits, and less memory asked never means more used."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.memory.budget import MemoryBudget
from partita.memory.joint.part import PartMenu, PartWay
from partita.memory.joint.step import RecordedCall, RecordedStep
from partita.memory.joint.step_plan import PlannedWays, infeasible, plan_steps
from partita.solvers import shared_choices

_Step = tuple[RecordedStep, dict[int, PartMenu]]


def _menu(rows: list[tuple[int, int, int, int]]) -> PartMenu:
    ways = [
        PartWay((number,), float(seconds), held, held + forward, held + backward, frozenset(), frozenset())
        for number, (seconds, held, forward, backward) in enumerate(rows)
    ]
    return PartMenu(tuple(ways), tangent_bytes=2)


_ROWS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 30), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6
)


@st.composite
def _steps(draw: st.DrawFn) -> _Step:
    menus = dict(enumerate(map(_menu, draw(st.lists(_ROWS, min_size=1, max_size=6)))))
    called = draw(st.lists(st.sampled_from(sorted(menus)), min_size=1, max_size=9))
    forward = [(call, True) for call in range(len(called))]
    moments = (*forward, *((call, False) for call, _ in reversed(forward)))
    return RecordedStep(tuple(RecordedCall(part, (), ()) for part in called), moments, (), other_bytes=7), menus


def _planned(step: _Step, peak: int) -> PlannedWays:
    recorded, menus = step
    careful = {part: menu.most_careful for part, menu in menus.items()}
    names = {part: f"graph {part}" for part in menus}
    return plan_steps([recorded], menus, [careful], budget=MemoryBudget(peak), names=names)


def _seconds(step: _Step, planned: PlannedWays) -> float:
    return sum(planned.ways[call.part].seconds for call in step[0].calls)


@given(_steps(), st.sampled_from([2, 4, 150]))
@settings(max_examples=60, deadline=None)
def test_less_memory_asked_never_means_more_used_nor_less_time(step: _Step, states: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_choices, "_MOST_STATES", states)
        patch.setattr(shared_choices, "_MOST_WITH_SUMS", states)
        ends = _planned(step, 1)
        most = max(ends.plain_peak, ends.smallest_peak) + 3
        asked = sorted({max(ends.smallest_peak + (most - ends.smallest_peak) * at // 25, 1) for at in range(26)})
        plans = [_planned(step, peak) for peak in asked]
        refused = _planned(step, ends.smallest_peak - 1)
    assert all(plan.fits and plan.peak <= peak for peak, plan in zip(asked, plans, strict=True))
    peaks, seconds = [plan.peak for plan in plans], [_seconds(step, plan) for plan in plans]
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)
    assert not refused.fits
    assert infeasible(refused).smallest == ends.smallest_peak == peaks[0]
    assert plans[-1].peak <= ends.plain_peak
    assert seconds[-1] == sum(step[1][call.part].fastest.seconds for call in step[0].calls)
