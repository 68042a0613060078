"""Progress of compilations: which bodies count, and when a line is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import partita
from partita.plans.progress import Progress
from partita.policies import ByModule
from partita.treatments import Lower


def _noted(*steps: tuple[str, float]) -> None:
    progress = Progress()
    for region, body in (("a", 1), ("b", 2), ("c", 2), ("d", 3)):
        progress.expect(region, body)
    for region, seconds in steps:
        progress.note(region, seconds)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("PARTITA_PROGRESS", "1")
    return lambda: capsys.readouterr().err.splitlines()


def test_equal_bodies_count_once(shown: Any) -> None:
    _noted(("a", 2.0), ("b", 3.0), ("c", 0.0), ("d", 4.0))
    assert shown() == [
        "partita: 1 of 3 bodies, 2 s",
        "partita: 2 of 3 bodies, 5 s",
        "partita: 3 of 3 bodies, 9 s",
    ]


def test_what_takes_less_than_a_second_is_not_reported(shown: Any) -> None:
    _noted(("a", 0.2), ("b", 0.2), ("d", 0.2))
    assert shown() == []


def test_there_is_a_line_a_second_and_one_at_the_end(shown: Any) -> None:
    _noted(("a", 1.5), ("b", 0.2), ("d", 0.2))
    assert shown() == ["partita: 1 of 3 bodies, 2 s", "partita: 3 of 3 bodies, 2 s"]


def test_nothing_is_written_where_nobody_looks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PARTITA_PROGRESS", raising=False)
    _noted(("a", 5.0))
    assert capsys.readouterr().err == ""


def test_a_lowered_program_counts_its_bodies(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)), nn.Linear(4, 2))
    x = torch.randn(2, 4)
    plan = partita.plan(partita.capture(model, (x,)), ByModule("*"), Lower("aot_eager", strict=True))
    with caplog.at_level("INFO", "partita.plans.progress"):
        plan.apply().module()(x)
    told = [record.getMessage() for record in caplog.records if record.name == "partita.plans.progress"]
    assert [line.split(",")[0] for line in told] == ["1 of 2 bodies", "2 of 2 bodies"]
