"""A saved program holds each body once, and torch's loader and ours read it."""

from __future__ import annotations

import json
import math
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plans.test_plan_sharing import ARGS, _bodies, _stack
from tests.program.archives.helpers import Spoilt, X
from torch import Tensor, nn
from torch._export.serde.serialize import SerializeError
from torch.export import Dim

import partita
from partita import Program
from partita.errors import ArchiveError
from partita.policies import BySize, Repeats
from partita.program.archives import load_exported
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


# Numbers ---------------------------------------------------------------------------------------------------------


class _Known(nn.Module):
    """A number out of memory that is known nevertheless: torch writes `5` into the file."""

    def forward(self, x: Tensor, k: Tensor) -> Any:
        n = k.item()
        torch._check(n == 5)
        return x.sin() * n, x.cos() * (n * 0.5), n


class _Sized(nn.Module):
    def forward(self, x: Tensor) -> Any:
        rows = x.shape[0]
        torch._check(rows > 3)
        half = torch.sym_float(rows * 2) / 2.0
        return x.sin() + half, x.cos() * (rows * 2), half


def _known_numbers(path: Path, values: dict[str, Any]) -> Path:
    """A program whose file has these known values in the place of expressions."""
    rows = torch.export.Dim("rows", min=4, max=64)
    torch.export.save(torch.export.export(_Sized(), (X,), dynamic_shapes=({0: rows},)), path)
    spoilt = Spoilt(path)

    def change(program: Any) -> None:
        for kind, value in values.items():
            table = program["graph_module"]["graph"][f"sym_{kind}_values"]
            table.update({key: {f"as_{kind}": value} for key in table})

    spoilt.program(change)
    return spoilt.write(path)


@pytest.mark.parametrize("load", [load_exported, torch.export.load, lambda path: load_exported(path, trusted=True)])
@pytest.mark.parametrize("treatment", [Call(), Recompute()])
def test_known_numbers_cross_into_regions_that_are_saved(tmp_path: Path, load: Any, treatment: Any) -> None:
    args = (X, torch.tensor(5))
    torch.export.save(torch.export.export(_Known(), args), tmp_path / "m.pt2")
    program = Program.of(load(tmp_path / "m.pt2"))
    after = partita.plan(program, BySize(operators=1), treatment).apply()
    after.save(tmp_path / "cut.pt2")
    assert torch.export.load(tmp_path / "cut.pt2").module()(*args)[2] == 5
    loaded = Program.of(tmp_path / "cut.pt2")
    loaded.save(tmp_path / "again.pt2")
    partita.verify(program, Program.of(tmp_path / "again.pt2"), args)


@pytest.mark.parametrize("value", [2.5, -0.0, 1e300, math.inf, math.nan])
def test_known_floats_are_computed_where_they_are_read(tmp_path: Path, value: float) -> None:
    program = Program.of(_known_numbers(tmp_path / "m.pt2", {"int": 12, "float": value}))
    after = partita.plan(program, BySize(operators=1), Call()).apply()
    after.save(tmp_path / "cut.pt2")
    partita.verify(program, Program.of(tmp_path / "cut.pt2"), (X,))


def test_a_known_size_may_be_an_input(tmp_path: Path) -> None:
    class Times(nn.Module):
        def forward(self, x: Tensor, n: int) -> Tensor:
            return x * n

    torch.export.save(torch.export.export(Times(), (X, 6), dynamic_shapes=(None, Dim.DYNAMIC)), tmp_path / "m.pt2")
    spoilt = Spoilt(tmp_path / "m.pt2")
    spoilt.program(lambda program: program["graph_module"]["graph"]["sym_int_values"].update(n={"as_int": 6}))
    Program.of(spoilt.write(tmp_path / "m.pt2")).save(tmp_path / "again.pt2")
    assert torch.equal(Program.of(tmp_path / "again.pt2").module()(X, 6), X * 6)


def test_a_scalar_may_be_unsigned(tmp_path: Path) -> None:
    class Full(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((2,), 2**64 - 1, dtype=torch.uint64)

    Program.of(torch.export.export(Full(), (X,))).save(tmp_path / "m.pt2")
    assert Program.of(tmp_path / "m.pt2").module()(X).tolist() == [2**64 - 1] * 2


@pytest.mark.parametrize(
    ("function", "regions", "words"),
    [
        (lambda x: x.sin() * x.sum().item(), 3, "the input 'item' of a graph"),
        (lambda x: (x.sin(), (x.sum() > 0).item()), 1, "the result 'item'"),
        (lambda x: x * complex(math.inf, 2), 1, r"\(inf\+2j\) at 'mul'"),
        (lambda x: (x.sin(), 2**70), 1, "1180591620717411303424 at 'output'"),
    ],
)
def test_numbers_that_no_file_holds_are_refused_by_name(
    tmp_path: Path, function: Any, regions: int, words: str
) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    program = Program.of(torch.export.export(Model(), (X,)))
    after = partita.plan(program, BySize(parts=regions), Call()).apply()
    with pytest.raises(ArchiveError, match=f"{words} is a number that no file of torch .* can hold") as caught:
        after.save(tmp_path / "m.pt2")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m.pt2").exists()


def test_a_folder_that_is_not_there_is_no_fault_of_the_program(tmp_path: Path) -> None:
    program = Program.of(torch.export.export(nn.Linear(4, 4), (X,)))
    with pytest.raises(RuntimeError, match="does not exist"):
        program.save(tmp_path / "nowhere" / "m.pt2")


def test_what_torch_cannot_save_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise SerializeError("Failed serializing node\n Original exception Traceback\n  TypeError: a reason\n")

    monkeypatch.setattr(torch.export, "save", fail)
    with pytest.raises(ArchiveError, match=r"torch .* cannot save the program: TypeError: a reason$"):
        Program.of(torch.export.export(nn.Linear(4, 4), (X,))).save(tmp_path / "m.pt2")


def test_a_container_without_a_name_for_files_is_refused_with_torchs_advice(tmp_path: Path) -> None:
    pair = namedtuple("pair", "left right")
    program = partita.capture(lambda x: pair(x.sin(), x), (X,))
    with pytest.raises(ArchiveError, match="cannot save the program: Can't serialize TreeSpec of namedtuple class"):
        program.save(tmp_path / "m.pt2")
