"""`partita plan` shows and writes plans."""

from __future__ import annotations

from json import loads
from pathlib import Path
from shutil import copyfile

import torch
from tests.partita_cli.helpers import refused, run, saved, small
from torch import Tensor, nn
from torch.export import Dim

import partita
from partita.policies import BySize
from partita.treatments import Call


def test_plan_prints_what_python_prints(small_file: Path) -> None:
    ran = run("plan", small_file, "--policy", "size:parts=2")
    program = partita.Program.of(small_file)
    assert ran.out == f"{partita.plan(program, BySize(parts=2), Call())}\n"


def test_plan_as_json_has_what_the_table_has(small_file: Path) -> None:
    first, second = run("plan", small_file, "--policy", "size:parts=2", "--json").json["regions"]
    assert (first["nodes"], second["nodes"]) == (["linear", "relu"], ["linear_1"])
    assert (first["inputs"], first["outputs"], first["bytes_in"], first["bytes_out"]) == (3, 1, 704, 256)
    assert (first["flops"], first["treatment"], first["label"]) == (1024, "Call()", "0")


def test_plan_writes_a_file_that_is_read_again(small_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    ran = run("plan", small_file, "-p", "size:parts=2", "-t", "recompute", "-o", file)
    assert ran.status == 0
    assert ran.err == f"written to {file}\n"
    again = run("plan", small_file, "--plan", file, "--json").json
    assert [region["treatment"] for region in again["regions"]] == ["Recompute(keep=KeepNothing())"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def _treatments(file: Path, *words: str) -> dict[str, str]:
    """The treatment of each region, with a region for each of the blocks and one for the head."""
    ran = run("plan", file, "-p", "module:blocks.*,head", *words, "--json")
    assert ran.status == 0, ran.err
    return {one["label"]: one["treatment"].partition("(")[0] for one in ran.json["regions"]}


def test_treatments_are_given_by_name_label_and_pattern(counting_file: Path) -> None:
    given = ("-t", "blocks.*=recompute:keep=everything", "-t", "blocks_3=mark:key=tag", "-t", "lower:aot_eager")
    assert _treatments(counting_file, *given) == {
        **dict.fromkeys(("blocks.0", "blocks.1", "blocks.2"), "Recompute"),
        "blocks.3": "Mark",
        "head": "Lower",
    }


def test_regions_that_no_treatment_names_are_called(counting_file: Path) -> None:
    found = _treatments(counting_file, "-t", "head=recompute")
    assert found == {**dict.fromkeys(("blocks.0", "blocks.1", "blocks.2", "blocks.3"), "Call"), "head": "Recompute"}


def test_of_several_treatments_that_fit_a_region_the_last_counts(counting_file: Path) -> None:
    found = _treatments(counting_file, "-t", "head=recompute", "-t", "*=leave-eager", "-t", "blocks.1=recompute")
    assert [label for label, name in found.items() if name == "Recompute"] == ["blocks.1"]


def test_treatments_of_regions_that_are_not_there_are_refused(counting_file: Path) -> None:
    words = ("plan", counting_file, "-p", "module:blocks.*,head", "-t")
    assert "did you mean 'head'" in refused(*words, "haed=recompute")
    assert "there are blocks_0, blocks.0" in refused(*words, "layers.*=recompute")
    assert "did you mean '*locks*'" in refused(*words, "locks*=recompute")
    assert "did you mean 'recompute'" in refused(*words, "head=recompte")
    assert "both for all regions" in refused(*words, "recompute", "-t", "call")
    assert "says no regions before '='" in refused(*words, "=recompute")


def test_bytes_of_dynamic_sizes_are_those_of_the_trace_and_marked(tmp_path: Path) -> None:
    file = saved(small(), tmp_path / "dynamic.pt2", dynamic_shapes=({0: Dim("rows", max=64)},))
    words = (file, "-p", "size:parts=2")
    table = run("plan", *words).out
    assert "~704      ~256" in table
    assert table.splitlines()[4] == "~ is at the sizes of the trace; sizes are dynamic, and other calls have others"
    first, second = run("plan", *words, "--json").json["regions"]
    assert (first["bytes_in"], first["dynamic_in"], second["bytes_out"]) == (704, True, 128)
    run("report", *words, "-o", tmp_path / "report.json")
    reported = loads((tmp_path / "report.json").read_text())["regions"]
    for key in ("bytes_in", "bytes_out", "dynamic_in", "dynamic_out", "flops"):
        assert [one[key] for one in reported] == [first[key], second[key]]


def test_inspect_plan_and_report_count_the_same_operators(tmp_path: Path) -> None:
    class Taking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first, second = x.split(4, -1)
            with torch.no_grad():
                second = second.relu()
            return first + second * x.shape[0]

    file = saved((Taking(), (torch.randn(2, 8),)), tmp_path / "taking.pt2", dynamic_shapes=({0: Dim.DYNAMIC},))
    words = (file, "-p", "size:operators=2")
    inspected, planned = run("inspect", file, "--json").json, run("plan", *words, "--json").json
    run("report", *words, "-o", tmp_path / "report.json")
    reported = loads((tmp_path / "report.json").read_text())
    assert inspected["nodes"] == planned["nodes"] == len(reported["nodes"]["name"])
    assert inspected["outer_operators"] == planned["operators"] == reported["operators"] == 6
    assert "operator.getitem" not in inspected["operators"]
    inside = [one["operators"] for one in planned["regions"]]
    assert inside == [one["nodes"] for one in reported["regions"]]
    assert run("plan", *words, "--summary").out == f"{sum(inside)} nodes in {len(inside)} regions, 0 outside\n"
    assert sum(inside) == 6


def test_plan_says_what_is_outside_and_why(small_file: Path) -> None:
    told = run("plan", small_file, "-p", "module:2", "--summary").out
    assert told.startswith("1 node in 1 region, 2 outside\n")
    data = run("plan", small_file, "-p", "module:2", "--json").json
    assert sum(sum(group["operators"].values()) for group in data["excluded"]) == 2


def test_a_policy_is_needed_and_a_plan_has_its_own(small_file: Path, tmp_path: Path) -> None:
    assert "--policy size:parts=2" in refused("plan", small_file)
    assert "give --plan, or" in refused("plan", small_file, "--plan", "plan.json", "-p", "size:parts=2")
    assert "missing.json" in refused("plan", small_file, "--plan", tmp_path / "missing.json")


def test_a_plan_for_another_program_is_refused(small_file: Path, counting_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    run("plan", small_file, "-p", "size:parts=2", "-o", file)
    assert "is a plan for another program" in refused("plan", counting_file, "--plan", file)


def test_what_a_policy_does_not_find_is_refused_with_near_names(small_file: Path) -> None:
    assert "aten.linear" in refused("plan", small_file, "-p", "around-operators:aten.liner")


def test_an_output_that_cannot_be_written_is_refused_before_anything_else(small_file: Path, tmp_path: Path) -> None:
    words = ("plan", tmp_path / "never_read.pt2", "-p", "size:parts=2", "-o")
    assert "there is no folder" in refused(*words, tmp_path / "missing" / "plan.json")
    folder = tmp_path / "folder.json"
    folder.mkdir()
    assert "is a folder" in refused(*words, folder)
    assert "should end in .json" in refused(*words, tmp_path / "plan.txt")
    assert list(tmp_path.iterdir()) == [folder]


def test_no_command_writes_over_what_it_reads(small_file: Path, tmp_path: Path) -> None:
    model, plan = tmp_path / "model.pt2", tmp_path / "plan.json"
    copyfile(small_file, model)
    run("plan", model, "-p", "size:parts=2", "-o", plan)
    before = {path: path.read_bytes() for path in (model, plan)}
    for words in (
        ("apply", model, "-p", "size:parts=2", "-o", tmp_path / ".." / tmp_path.name / "model.pt2"),
        ("plan", model, "--plan", plan, "-o", plan),
        ("report", model, "--plan", plan, "-o", plan),
        ("report", model, "--plan", plan, "--format", "json", "-o", model),
    ):
        assert "is what the command reads" in refused(*words)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_backend_that_is_missing_is_refused_with_near_names(small_file: Path) -> None:
    assert "'inductor'" in refused("plan", small_file, "-p", "capability:inducter")
    assert "'inductor'" in refused("plan", small_file, "-p", "size:parts=2", "-t", "lower:inducter")


def test_wrong_words_are_refused_before_a_file_is_read(tmp_path: Path) -> None:
    assert "did you mean 'size'" in refused("plan", tmp_path / "missing.pt2", "-p", "sise:parts=2")


def test_an_option_that_no_file_holds_is_refused_and_nothing_is_written(small_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    told = refused("plan", small_file, "-p", "size:parts=2", "-t", f"lower:inductor,cache={tmp_path}", "-o", out)
    assert "a file does not hold the option 'cache'" in told
    assert list(tmp_path.iterdir()) == []


def test_a_trusted_file_is_loaded_by_torch(small_file: Path) -> None:
    words = ("plan", small_file, "-p", "size:parts=2")
    assert run(*words, "--trusted").out == run(*words).out
