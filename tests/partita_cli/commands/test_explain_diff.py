"""`partita explain` and `partita diff` say why, and what changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.partita_cli.helpers import refused, run


def test_explain_says_where_a_node_is_and_why(counting_file: Path) -> None:
    ran = run("explain", counting_file, "dropout_1", "-p", "module:blocks.*")
    assert ran.out.startswith("dropout_1 = aten.dropout.default(relu_1, 0.1, True)  # float32[2, 3, 8]\n")
    assert "in region 'blocks_1', treated by Call()" in ran.out
    assert "stays after dropout" in ran.out
    data = run("explain", counting_file, "dropout_1", "-p", "module:blocks.*", "--json").json
    assert (data["region"], data["before"]) == ("blocks_1", ["dropout_2"])


def test_explain_without_a_plan_tells_what_orders_a_node(counting_file: Path, small_file: Path) -> None:
    assert "stays after dropout" in run("explain", counting_file, "dropout_1").out
    assert "nothing orders it but data" in run("explain", small_file, "relu").out


def test_an_unknown_node_is_refused_with_near_names(small_file: Path) -> None:
    assert "did you mean 'relu'" in refused("explain", small_file, "rellu")


@pytest.fixture
def plans(small_file: Path, tmp_path: Path) -> tuple[Path, Path]:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    run("plan", small_file, "-p", "size:parts=2", "-o", one)
    run("plan", small_file, "-p", "size:parts=3", "-o", other)
    return one, other


def test_diff_tells_what_changes_by_words_and_status(small_file: Path, plans: tuple[Path, Path]) -> None:
    one, other = plans
    ran = run("diff", one, other, "--program", small_file)
    assert ran.status == 1
    assert "+ region 'part_2', 1 node" in ran.out
    same = run("diff", one, one, "--program", small_file)
    assert (same.status, same.out) == (0, "the plans are equal\n")
    assert run("diff", one, other, "--program", small_file, "--json").json["equal"] is False


def test_plans_of_another_program_have_no_diff(counting_file: Path, plans: tuple[Path, Path]) -> None:
    assert "another program" in refused("diff", *plans, "--program", counting_file)
    assert "--program" in refused("diff", *plans)
