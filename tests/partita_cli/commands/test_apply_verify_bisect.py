"""`partita apply`, `verify` and `bisect`: a cut file means the same, and what differs is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.partita_cli.helpers import counting, refused, run, saved, small

import partita


def test_a_plan_is_applied_and_verified(counting_file: Path, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out.pt2"
    run("plan", counting_file, "-p", "module:blocks.*", "-t", "recompute", "-o", plan)
    ran = run("apply", counting_file, "--plan", plan, "-o", out)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith(f"{out}: 4 regions; ")
    assert 4 in run("inspect", out, "--json").json["bodies"].values()
    checked = run("verify", counting_file, out)
    assert checked.status == 0
    assert checked.out.startswith("nothing differs in 3 calls")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.pt2", "plan.json"]


def test_what_differs_is_told_by_words_status_and_json(tmp_path: Path) -> None:
    model, args = small()
    one = saved((model, args), tmp_path / "one.pt2")
    with torch.no_grad():
        model[2].bias.add_(1)  # type: ignore[index, union-attr, operator]
    other = saved((model, args), tmp_path / "other.pt2")
    ran = run("verify", one, other)
    assert ran.status == 1
    assert "value of output" in ran.out
    data = run("verify", one, other, "--json", "--no-gradients").json
    assert data["equal"] is False
    assert data["differences"]
    assert run("verify", one, other, "--absolute", "2").status == 0


def test_inputs_come_from_a_file_that_is_read_as_data(small_file: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.pt", tmp_path / "bad.pt"
    torch.save((torch.randn(4, 8),), good)
    torch.save((torch.nn.Linear(2, 2),), bad)
    words = ("verify", small_file, small_file, "--inputs")
    assert run(*words, good).status == 0
    assert "cannot be read as data" in refused(*words, bad)
    assert "there is no file" in refused(*words, tmp_path / "missing.pt")


def test_inputs_that_the_program_refuses_verify_nothing(small_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "wrong.pt"
    torch.save((torch.randn(4, 9),), file)
    assert "nothing could be compared" in refused("verify", small_file, small_file, "--inputs", file)


def test_a_plan_is_verified_without_a_second_file(small_file: Path) -> None:
    ran = run("verify", small_file, "-p", "size:parts=2", "-t", "lower:aot_eager", "--seed", "3")
    assert ran.status == 0
    assert "give a second program" in refused("verify", small_file)
    assert "give a second program" in refused("verify", small_file, small_file, "-p", "size:parts=2")


def test_what_no_file_can_hold_is_refused_and_nothing_is_written(small_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt2"
    told = refused("apply", small_file, "-p", "size:parts=2", "-t", "lower:aot_eager", "-o", out)
    assert "use Delegate in place of Lower" in told
    assert list(tmp_path.iterdir()) == []


def test_marks_are_written_without_a_cut(small_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt2"
    assert run("apply", small_file, "-p", "size:parts=2", "-t", "mark:stage", "--marks", "-o", out).status == 0
    assert run("inspect", out, "--json").json["bodies"] == {}


def test_bisect_finds_nothing_where_nothing_differs(small_file: Path) -> None:
    ran = run("bisect", small_file, "-p", "size:parts=2")
    assert ran.status == 0
    assert ran.out.startswith("nothing differs")


@pytest.fixture
def wrong_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`aot_eager` is wrong where there is a relu."""
    aot_eager = type(partita.backends.find_backend("aot_eager"))
    compiled = aot_eager.compile

    def wrong(self, body, inputs):  # type: ignore[no-untyped-def]
        function = compiled(self, body, inputs)
        spoilt = any("relu" in node.name for node in body.graph.nodes)
        return lambda *args: [one + 1 if spoilt else one for one in function(*args)]

    monkeypatch.setattr(aot_eager, "compile", wrong)


@pytest.mark.usefixtures("wrong_relu")
def test_verify_names_the_region_that_differs_by_itself(small_file: Path) -> None:
    words = ("verify", small_file, "-p", "size:parts=3", "-t", "lower:aot_eager,max_variants=4", "--no-gradients")
    ran = run(*words)
    assert ran.status == 1
    assert "region 'part_1' differs by itself, treated by Lower('aot_eager'" in ran.out.splitlines()[-1]
    assert "next: partita bisect with the same plan names the operators" in ran.err
    located = run(*words, "--json").json["located"]
    assert (located["blame"], located["regions"]) == ("region", ["part_1"])
    assert run("verify", small_file, "-p", "size:parts=3", "--json").json["located"] is None


def test_a_script_that_would_show_nothing_is_not_promised(
    small_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partita.Bisection, "reproduce", _shows_nothing)
    aot_eager = type(partita.backends.find_backend("aot_eager"))
    monkeypatch.setattr(aot_eager, "compile", lambda self, body, inputs: _raise(ValueError("no compiler")))
    words = ("bisect", small_file, "-p", "size:parts=2", "-t", "lower:aot_eager,max_variants=5", "--no-gradients")
    ran = run(*words, "--reproduce", tmp_path / "found")
    assert (ran.status, ran.err.splitlines()[-1]) == (1, "no script is written")
    assert not (tmp_path / "found").exists()


def _shows_nothing(self: partita.Bisection, folder: Path) -> str:
    raise partita.errors.OptionError("no script is written")


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.usefixtures("wrong_relu")
def test_bisect_names_the_region_and_writes_a_script(small_file: Path, tmp_path: Path) -> None:
    words = ("bisect", small_file, "-p", "size:parts=3", "-t", "lower:aot_eager,max_variants=3", "--no-gradients")
    ran = run(*words, "--reproduce", tmp_path / "found")
    assert ran.status == 1
    assert "region 'part_1' differs" in ran.out
    assert (tmp_path / "found" / "reproduce.py").exists()
    data = run(*words, "--json", "--reproduce", tmp_path / "again").json
    assert data["script"] == str(tmp_path / "again" / "reproduce.py")
    assert (data["blame"], data["regions"], data["nodes"]) == ("region", ["part_1"], ["relu"])
    assert "\n  relu: aten.relu.default in 1 (ReLU)\n" in ran.out
    assert data["places"] == [
        {"node": "relu", "calls": "aten.relu.default", "module": "1", "module_class": "ReLU", "source": ""}
    ], "a file has no lines of source"


def test_a_folder_that_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "missing" / "folder"):
        words = ("bisect", tmp_path / "never_read.pt2", "-p", "size:parts=2", "--reproduce", place)
        assert "is for a folder" in refused(*words)


def test_random_inputs_fit_the_tables_they_look_up(tmp_path: Path) -> None:
    file = saved(counting(), tmp_path / "counting.pt2")
    for seed in range(3):
        assert run("verify", file, "-p", "size:parts=2", "--seed", seed, "--no-gradients").status == 0
