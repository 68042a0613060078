"""A saved program holds each body once, and torch's loader and ours read it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plans.test_sharing import ARGS, _bodies, _stack

import partita
from partita import Program
from partita.policies import Repeats
from partita.treatments import Call, Mode, Recompute


def _graph(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("models/model.json")]
        return json.loads(archive.read(name))["graph_module"]["graph"]


def _full_graphs(graph: Any) -> int:
    arguments = [given["arg"] for node in graph["nodes"] for given in node["inputs"]]
    bodies = [argument["as_graph"]["graph"] for argument in arguments if "as_graph" in argument]
    return sum(1 + _full_graphs(body) for body in bodies if body["nodes"])


@pytest.mark.parametrize("treatment", [Call(), Recompute(), Mode()])
def test_a_file_holds_one_layer_and_both_loaders_read_it(tmp_path: Path, treatment: Any) -> None:
    model = _stack(8, frozen=True)
    after = partita.plan(partita.capture(model, ARGS), Repeats(min_size=3), treatment).apply()
    after.save(tmp_path / "shared.pt2")
    torch.export.save(after.exported(), tmp_path / "plain.pt2")
    few, many = _full_graphs(_graph(tmp_path / "shared.pt2")), _full_graphs(_graph(tmp_path / "plain.pt2"))
    assert few == _bodies(after.exported().graph_module) < 8 < many
    ours, theirs = Program.of(tmp_path / "shared.pt2"), torch.export.load(tmp_path / "shared.pt2")
    assert _bodies(ours.graph_module) == _bodies(theirs.graph_module) == few
    for loaded in (ours, theirs.module()):
        partita.verify(model, loaded, ARGS)
    unflattened = torch.export.unflatten(theirs)
    assert list(unflattened.state_dict()) == list(model.state_dict())
    assert torch.equal(unflattened(*ARGS), model(*ARGS))


def test_saving_leaves_torchs_own_as_it_was(tmp_path: Path) -> None:
    after = partita.plan(partita.capture(_stack(), ARGS), Repeats(min_size=3), Call()).apply()
    torch.export.save(after.exported(), tmp_path / "before.pt2")
    after.save(tmp_path / "shared.pt2", extra_files={"note.txt": "six layers"})
    torch.export.save(after.exported(), tmp_path / "after.pt2")
    assert _graph(tmp_path / "before.pt2") == _graph(tmp_path / "after.pt2")
    read = {"note.txt": ""}
    torch.export.load(tmp_path / "shared.pt2", extra_files=read)
    assert read == {"note.txt": "six layers"}
