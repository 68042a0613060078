"""`partita inspect` tells what is in a file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from tests.helpers.work import calls_during
from tests.partita_cli.helpers import refused, run, saved
from torch import nn

from partita import Program
from partita.errors import ArchiveError
from partita_cli.commands import inspect


def test_inspect_counts_what_is_in_a_program(counting_file: Path) -> None:
    found = run("inspect", counting_file, "--json").json
    assert found["operators"]["aten.linear.default"] == 5
    assert found["inputs"] == [{"name": "ids", "dtype": "int64", "shape": [2, 3]}]
    assert [one["shape"] for one in found["outputs"]] == [[2, 3, 11]]
    assert found["state"]["parameters"] == {"count": 10, "elements": 464, "bytes": 4 * 464}
    assert found["state"]["buffers"]["count"] == 1
    assert len(found["effects"]["random"]) == 4
    assert len(found["effects"]["mutations"]) == 1
    assert found["effects"]["mutated_inputs"] == ["b_seen"]
    assert list(found["modes"]) == ["no_grad"]
    assert [(one["calls"], one["nodes"]) for one in found["repeats"]] == [(4, 4)]
    assert found["flops"] > 0
    assert found["barriers"] == []
    assert found["bodies"] == {"partita_set_grad_enabled": 1}


def test_inspect_prints_the_same_in_words(counting_file: Path) -> None:
    ran = run("inspect", counting_file)
    assert ran.status == 0
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert "effects 1 mutation of b_seen; 4 random operators" in lines
    assert "modes no_grad: 1 operator" in lines
    assert "barriers none: nothing stops a cut" in lines
    assert "repeat_0 4 calls 4 nodes" in lines
    assert "\x1b" not in ran.out


def test_inspect_names_dynamic_sizes(tmp_path: Path) -> None:
    sizes = {"input": {0: torch.export.Dim("batch", min=2, max=64)}}
    file = saved((nn.Linear(8, 8), (torch.randn(4, 8),)), tmp_path / "dynamic.pt2", dynamic_shapes=sizes)
    found = run("inspect", file, "--json").json
    (symbol,) = found["symbols"]
    assert found["symbols"][symbol] == "2 to 64"
    assert found["inputs"][0]["shape"] == [symbol, 8]


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.pt2"
    text.write_text("hello")
    other = tmp_path / "other.pt2"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other/nothing", "nothing")
    assert "no .pt2 archive" in refused("inspect", text)
    assert str(other) in refused("inspect", other)
    assert refused("inspect", tmp_path / "missing.pt2") == f"there is no file {tmp_path / 'missing.pt2'}"
    assert "directory" in refused("inspect", tmp_path)


def test_a_file_of_torch_save_is_refused_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "pickled.pt2"
    torch.save(nn.Linear(2, 2), file)
    assert str(file) in refused("inspect", file)


def test_inspecting_takes_time_in_proportion_to_the_nodes(tmp_path: Path) -> None:
    def calls(blocks: int) -> int:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(blocks)))
        file = saved((model, (torch.randn(2, 4),)), tmp_path / f"{blocks}.pt2")
        run("inspect", file)
        return calls_during(run, "inspect", file)

    # From 132 to 516 nodes. The calls grow by 3.9 where every step is linear; what all files need makes it less.
    assert calls(128) < 4.2 * calls(32)


def test_a_container_that_nothing_registers_names_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ArchiveError("x.pt2 cannot be loaded: no container 'some.module.Output' is registered; import it first")

    monkeypatch.setattr(Program, "of", refuse)
    assert refused("inspect", tmp_path / "x.pt2").endswith("add --import some.module")


def test_barriers_are_listed(small_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = inspect.facts_of(Program.of(small_file), small_file)
    barriers = [{"node": f"call_{at}", "calls": "mystery"} for at in range(15)]
    inspect._print({**data, "barriers": barriers})
    lines = capsys.readouterr().out.splitlines()
    assert "  barriers    15, see below" in lines
    assert "  call_11  mystery" in lines
    assert "  and 3 more; --json has all of them" in lines
