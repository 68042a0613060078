"""What notebooks show: small tables in which every text is escaped."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch
from tests.memory.models import RATES, Model
from tests.reports.plans import HOSTILE, chain, hostile
from torch import nn

import partita
from partita import Program
from partita._html import MOST_ROWS, html_facts, html_table
from partita.memory import MemoryBudget, step_memory
from partita.memory.joint.plan import JointMemoryPlan

_TABLE = {"div", "table", "caption", "thead", "tbody", "tr", "th", "td"}


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_plan_is_the_table_that_it_prints() -> None:
    plan = chain(20, 3)
    page = _Page(plan._repr_html_())
    printed = str(plan).split()
    assert [text for text in page.texts if text.startswith("part_")] == ["part_0", "part_1", "part_2"]
    assert set(" ".join(page.texts).split()) == {word for word in printed if set(word) != {"-"}}


def test_hostile_names_are_escaped() -> None:
    plan, comparison = hostile()
    for shown in (plan, comparison, plan.program):
        page = _Page(shown._repr_html_())
        assert page.tags <= _TABLE
    assert HOSTILE in _Page(plan._repr_html_()).texts
    assert HOSTILE in _Page(comparison._repr_html_()).texts


def test_cells_captions_heads_and_notes_are_escaped() -> None:
    page = _Page(html_table((HOSTILE,), [(HOSTILE,)], title=HOSTILE, notes=[HOSTILE]))
    assert page.tags <= _TABLE
    assert page.texts == [HOSTILE] * 4
    assert _Page(html_facts({HOSTILE: HOSTILE}, notes=[HOSTILE])).texts == [HOSTILE] * 3


def test_long_tables_end_and_say_so() -> None:
    page = _Page(html_table(("a",), [(str(at),) for at in range(MOST_ROWS + 1_000)]))
    assert page.texts[-2:] == [str(MOST_ROWS - 1), "1,000 more rows"]


def test_columns_of_numbers_are_aligned_right() -> None:
    shown = html_table(("name", "number"), [("a", "1,000"), ("1", "?")])
    assert shown.count("text-align: right") == 3
    assert shown.count("text-align: left") == 3


@pytest.mark.parametrize("kind", ["graph module", "exported program", "joint graph"])
def test_a_program_says_what_it_is(kind: str) -> None:
    model, args = nn.Linear(2, 2), (torch.randn(2, 2),)
    made = {
        "graph module": lambda: Program.of(torch.fx.symbolic_trace(model)),
        "exported program": lambda: partita.capture(model, args),
        "joint graph": lambda: partita.capture_joint(model, args),
    }
    assert _Page(made[kind]()._repr_html_()).texts[:2] == ["program", kind]


def test_a_comparison_without_differences_is_one_line() -> None:
    model = nn.Linear(2, 2)
    comparison = partita.compare(model, model, (torch.randn(2, 2),))
    assert _Page(comparison._repr_html_()).texts == ["comparison", str(comparison)]


def test_budgets_memory_plans_and_pictures_are_shown() -> None:
    step = step_memory(Model(), (torch.randn(64, 32), torch.randint(16, (64,))), rates=RATES)
    plan = step.plan((step.smallest_peak_bytes + step.plain_peak_bytes) // 2)
    assert _Page(MemoryBudget("11GB")._repr_html_()).texts == ["memory budget", "11GB"]
    page = _Page(plan._repr_html_())
    assert {"table", "svg"} <= page.tags
    assert any(text.startswith("peak ") for text in page.texts)
    assert plan.picture()._repr_html_() == plan.picture().svg()
    assert hasattr(JointMemoryPlan, "_repr_html_")
