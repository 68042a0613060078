"""`partita report` writes a page about a plan, or data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.partita_cli.helpers import refused, run


@pytest.mark.parametrize(
    ("name", "begins"), [("plan.html", "<!doctype html>"), ("plan.json", "{"), ("plan.dot", "digraph")]
)
def test_a_report_is_of_the_kind_that_its_name_ends_in(
    name: str, begins: str, small_file: Path, tmp_path: Path
) -> None:
    ran = run("report", small_file, "-p", "size:parts=2", "-o", tmp_path / name)
    assert (ran.status, ran.out) == (0, "")
    assert ran.err == f"written: {tmp_path / name}\n"
    assert (tmp_path / name).read_text().lower().startswith(begins)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_report_has_the_comparison(small_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert run("report", small_file, "-p", "size:parts=2", "--verify", "-o", file).status == 0
    assert json.loads(file.read_text())["verification"]["equal"] is True


def test_a_report_in_another_format(small_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "nodes.txt"
    assert run("report", small_file, "-p", "size:parts=2", "--format", "model_explorer", "-o", file).status == 0
    assert json.loads(file.read_text())
    assert "should end in .html" in refused("report", small_file, "-p", "size:parts=2", "-o", file)
    assert "'gif'" in refused("report", small_file, "-p", "size:parts=2", "-o", file, "--format", "gif")


def test_inputs_that_the_original_does_not_accept_are_no_yes(small_file: Path, tmp_path: Path) -> None:
    torch.save((torch.randn(4, 9),), tmp_path / "wrong.pt")
    words = (
        "report",
        small_file,
        "-p",
        "size:parts=2",
        "-o",
        tmp_path / "plan.html",
        "--inputs",
        tmp_path / "wrong.pt",
    )
    assert "nothing could be compared" in refused(*words, "--verify")
    assert "--inputs are for --verify" in refused(*words)
    assert not (tmp_path / "plan.html").exists()
