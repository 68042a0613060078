"""The benchmarks run, keep what they measure, and say when a target is missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.__main__ import main
from benchmarks.floor import minimal_copy
from benchmarks.graphs import KINDS, build, even_labels
from benchmarks.report import line
from benchmarks.rows import Row, at_least, at_most
from tests.helpers.torch_versions import NEEDS_SPLIT_MODULE_SIMPLE


@NEEDS_SPLIT_MODULE_SIMPLE
def test_sections_print_rows_and_keep_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiny.json"
    assert main(["split", "--tiny", "--check", "--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    assert {row["section"] for row in kept["rows"]} == {"split"}
    assert len(kept["rows"]) == len(capsys.readouterr().out.splitlines()) - 1
    assert all(row["value"] > 0 for row in kept["rows"])


@pytest.mark.slow
@NEEDS_SPLIT_MODULE_SIMPLE
def test_every_section_runs(tmp_path: Path) -> None:
    out = tmp_path / "tiny.json"
    assert main(["--tiny", "--check", "--out", str(out)]) == 0
    sections = {row["section"] for row in json.loads(out.read_text())["rows"]}
    assert {"call", "code for compiled parts", "peak memory", "growth of user time"} <= sections


def test_a_process_of_its_own_measures_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.isolated import measured

    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert measured("peak_bytes", kind="residual", nodes=5_000, way="ours") > 1_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_have_the_asked_size_and_pass_lint(kind: str) -> None:
    module = build(kind, 300)
    module.graph.lint()
    assert len(module.graph.nodes) == 300
    assert set(even_labels(module, 7).values()) == set(range(7))


def test_the_floor_is_a_faithful_copy() -> None:
    module = build("random", 100)
    copied = minimal_copy(module.graph)
    copied.lint()
    assert str(copied) == str(module.graph)


def test_a_missed_target_is_named() -> None:
    row = Row(section="split", case="chain", unit="ms", ours=2.0, reading="times sooner", value=1.5, target=at_least(2))
    assert line(row).endswith("1.5 times sooner  >= 2    MISSED")
    assert at_most(0).holds(0)
    assert not at_most(0).holds(1)
