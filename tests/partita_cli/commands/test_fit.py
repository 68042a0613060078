"""`partita fit` plans a step that fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.partita_cli.helpers import refused, run

_MODELS = """
import torch
from torch import nn

class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

def build():
    return Step(), (torch.randn(64, 16),)

def function():
    return (lambda x: x.sum()), (torch.randn(2),)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "command_steps.py").write_text(_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("command_steps", None)


def test_fit_prints_the_plan_and_writes_picture_and_program() -> None:
    ran = run("fit", "command_steps:build", "--peak", "0.8", "--picture", "step.svg", "-o", "fitted.pt2", "--chart")
    assert ran.status == 0
    assert "recompute" in ran.out
    assert "█ planned" in ran.out
    assert Path("step.svg").read_text().startswith("<svg")
    assert "written: step.svg" in ran.err
    assert run("inspect", "fitted.pt2").status == 0


def test_fit_writes_a_trace_of_the_step() -> None:
    assert run("fit", "command_steps:build", "--peak", "0.8", "--report", "step.trace.json").status == 0
    assert json.loads(Path("step.trace.json").read_text())["traceEvents"]


def test_fit_as_json_with_a_curve() -> None:
    words = ("fit", "command_steps:build", "--curve", "--points", "3", "--json")
    found = run(*words, "--peak", "0.8", "--optimizer", "AdamW").json
    assert found["plan"]["peak_bytes"] <= found["plan"]["budget_bytes"]
    peaks = [point["peak_bytes"] for point in found["curve"]]
    assert peaks == sorted(peaks)
    alone = run(*words).json
    assert alone["plan"] is None
    # The state of the optimizer, two copies of the parameters, is allocated throughout.
    assert found["curve"][0]["peak_bytes"] - alone["curve"][0]["peak_bytes"] == 2 * 4 * 4 * (16 * 16 + 16)


def test_a_budget_that_cannot_be_met_is_an_answer_and_not_an_error() -> None:
    ran = run("fit", "command_steps:build", "--peak", "1kB", "--picture", "step.svg")
    assert ran.status == 1
    assert "The smallest peak is" in ran.err
    assert not Path("step.svg").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give --peak"),
        (["--peak", "11XB"], "no unit of bytes"),
        (["--peak", "0.5", "--optimizer", "Adamm"], "has no optimizer 'Adamm'"),
        (["--peak", "0.5", "--picture", "step.gif"], "should end in .svg"),
        (["--peak", "-3"], "-3"),
    ],
)
def test_wrong_options_are_refused(words: list[str], told: str) -> None:
    assert told in refused("fit", "command_steps:build", *words)


def test_a_function_has_no_training_step() -> None:
    assert "torch.nn.Module" in refused("fit", "command_steps:function", "--peak", "0.5")


@pytest.mark.parametrize("words", [["--picture", "p.svg"], ["--report", "r.html"], ["-o", "o.pt2"], ["--chart"]])
def test_a_curve_alone_has_no_plan_to_write(words: list[str]) -> None:
    assert "give --peak, too" in refused("fit", "command_steps:build", "--curve", *words)
