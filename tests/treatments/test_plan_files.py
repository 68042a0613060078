"""Plans in files: what is saved is loaded, for the same program only, and everything else is refused in words."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import partita
from partita.backends import Inductor
from partita.errors import OptionError, PlanFileError
from partita.plans import files
from partita.policies import ByCapability, ByLabel, BySize, Repeats
from partita.treatments import (
    Call,
    Delegate,
    KeepAtMost,
    KeepExpensive,
    KeepNodes,
    KeepOperators,
    LeaveEager,
    Lower,
    Mark,
    Mode,
    Recompute,
)

X = torch.randn(2, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Own:
    """A treatment of a user."""

    factor: float
    names: tuple[str, ...] = ()

    def treat(self, body: GraphModule) -> GraphModule:
        return body


def _program() -> partita.Program:
    torch.manual_seed(0)
    return partita.capture(Model(), (X,))


@pytest.mark.parametrize(
    "treatment",
    [
        Call(),
        Mode(operators="torch"),
        Mark("key", ("a", 1, None, 2.5, [True])),
        LeaveEager(),
        Lower("aot_eager", strict=True, max_variants=3, cuda_graphs=frozenset({1, 2})),
        Delegate("aot_inductor"),
        Recompute(KeepOperators("aten.linear", "aten.relu")),
        Recompute(KeepNodes("linear")),
        Recompute(KeepAtMost(10)),
        Recompute(KeepExpensive(2.0)),
        Own(0.1, ("a", "b")),
    ],
    ids=repr,
)
def test_what_is_saved_is_loaded(treatment: Any, tmp_path: Path) -> None:
    program = _program()
    plan = partita.plan(program, BySize(parts=2), treatment)
    partita.save_plan(plan, tmp_path / "plan.json", classes=[Own])
    loaded = partita.load_plan(tmp_path / "plan.json", program, classes=[Own])
    assert loaded.treatments == plan.treatments
    assert [(one.name, one.label, one.nodes) for one in loaded.partition] == [
        (one.name, one.label, one.nodes) for one in plan.partition
    ]
    assert loaded.puts_back_modes == plan.puts_back_modes
    assert not plan.diff(loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_is_for_the_same_model_captured_again(tmp_path: Path) -> None:
    plan = partita.plan(_program(), ByLabel(lambda node: ("part", 1)), Call())
    partita.save_plan(plan, tmp_path / "plan.json")
    again = _program()
    partita.verify(again, partita.load_plan(tmp_path / "plan.json", again).apply(), (X,))
    other = partita.capture(nn.Sequential(Model(), nn.ReLU()), (X,))
    with pytest.raises(PlanFileError, match="for another program"):
        partita.load_plan(tmp_path / "plan.json", other)


class Scaled(nn.Module):
    """Two equal blocks but for a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for at, block in enumerate(self.blocks):
            x = torch.relu(block(x)).tanh() * (1 / (at + 2))
        return x


def test_a_file_says_which_numbers_are_passed_to_regions(tmp_path: Path) -> None:
    program = partita.capture(Scaled(), (X,))
    plan = partita.plan(program, Repeats(), Call())
    partita.save_plan(plan, tmp_path / "plan.json")
    loaded = partita.load_plan(tmp_path / "plan.json", partita.capture(Scaled(), (X,)))
    assert loaded.bodies() == plan.bodies()
    assert len(loaded.bodies()) == 1
    assert not partita.load_plan(tmp_path / "plan.json", program).diff(plan)
    partita.verify(program, partita.load_plan(tmp_path / "plan.json", program).apply(), (X,))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (["relu"], "'relu' has no number"),
        (["mlu"], "did you mean 'mul"),
        ([3], "which is no name"),
        ({}, "of the type"),
    ],
)
def test_numbers_that_cannot_be_passed_are_refused(numbers: Any, message: str, tmp_path: Path) -> None:
    program = partita.capture(Scaled(), (X,))
    path = tmp_path / "plan.json"
    partita.save_plan(partita.plan(program, Repeats(), Call()), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "numbers": numbers}))
    with pytest.raises(PlanFileError, match=message):
        partita.load_plan(path, program)


class WithModes(nn.Module):
    """Blocks in one another, two with equal bodies, and one in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def frozen(value: Tensor) -> Tensor:
            with torch.no_grad():
                return self.first(value).clone()  # type: ignore[no-any-return]

        for _ in range(2):
            with torch.no_grad():
                frozen_x = torch.relu(x)
                with torch.autocast("cpu", torch.bfloat16):
                    product = frozen_x @ frozen_x.transpose(0, 1)
            x = self.first(x) + product.float().sum()
        chosen = torch.cond(x.sum() > 0, frozen, lambda value: self.first(value) - 1, (x,))
        return x + chosen  # type: ignore[no-any-return]


def _with_modes() -> partita.Program:
    torch.manual_seed(0)
    return partita.capture(WithModes(), (X,))


@pytest.fixture(scope="module")
def with_modes() -> partita.Program:
    return _with_modes()


@pytest.mark.parametrize("trusted", [False, True], ids=["read as data", "loaded by torch"])
def test_a_plan_made_before_a_program_with_mode_blocks_is_saved_fits_the_file(
    with_modes: partita.Program, tmp_path: Path, *, trusted: bool
) -> None:
    plan = partita.plan(with_modes, BySize(parts=3), Call())
    partita.save_plan(plan, tmp_path / "plan.json")
    with_modes.save(tmp_path / "model.pt2")
    read = partita.Program.of(tmp_path / "model.pt2", trusted=trusted)
    loaded = partita.load_plan(tmp_path / "plan.json", read)
    assert not plan.diff(loaded)
    partita.verify(read, loaded.apply(), (X,))
    loaded.apply().save(tmp_path / "cut.pt2")
    partita.verify(read, partita.Program.of(tmp_path / "cut.pt2"), (X,))


def test_a_plan_for_a_file_with_mode_blocks_fits_the_same_model_captured_again(
    with_modes: partita.Program, tmp_path: Path
) -> None:
    with_modes.save(tmp_path / "model.pt2")
    read = partita.Program.of(tmp_path / "model.pt2")
    plan = partita.plan(read, ByCapability(lambda node: "no kernel" if "relu" in node.name else None), Call())
    partita.save_plan(plan, tmp_path / "plan.json")
    again = _with_modes()
    loaded = partita.load_plan(tmp_path / "plan.json", again)
    assert not plan.diff(loaded)
    assert loaded.summary() == plan.summary()
    partita.verify(again, loaded.apply(), (X,))


def test_a_plan_for_a_program_that_was_cut_fits_its_file(with_modes: partita.Program, tmp_path: Path) -> None:
    cut = partita.plan(with_modes, BySize(parts=2), Call()).apply()
    plan = partita.plan(cut, ByLabel(lambda node: "all"), Call())
    partita.save_plan(plan, tmp_path / "plan.json")
    cut.save(tmp_path / "cut.pt2")
    read = partita.Program.of(tmp_path / "cut.pt2")
    loaded = partita.load_plan(tmp_path / "plan.json", read)
    assert not plan.diff(loaded)
    partita.verify(read, loaded.apply(), (X,))


def test_a_plan_does_not_fit_a_program_whose_bodies_are_exchanged(tmp_path: Path) -> None:
    class Swapped(nn.Module):
        def __init__(self, *, swaps: bool) -> None:
            super().__init__()
            self.swaps = swaps

        def forward(self, x: Tensor) -> Tensor:
            one, other = (torch.sin, torch.cos) if self.swaps else (torch.cos, torch.sin)
            return torch.cond(x.sum() > 0, one, other, (x,))  # type: ignore[no-any-return]

    plan = partita.plan(partita.capture(Swapped(swaps=False), (X,)), ByLabel(lambda node: "all"), Call())
    partita.save_plan(plan, tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match="before or after it was saved"):
        partita.load_plan(tmp_path / "plan.json", partita.capture(Swapped(swaps=True), (X,)))


def test_reasons_of_excluded_nodes_are_kept(tmp_path: Path) -> None:
    program = _program()
    plan = partita.plan(program, ByCapability(lambda node: "no kernel" if "relu" in node.name else None), Call())
    partita.save_plan(plan, tmp_path / "plan.json")
    loaded = partita.load_plan(tmp_path / "plan.json", program)
    assert loaded.summary() == plan.summary()
    assert loaded.explain("relu") == plan.explain("relu")


@pytest.mark.parametrize(
    ("treatment", "message"),
    [
        (Lower("inductor", cache="somewhere"), "does not hold the option 'cache'"),
        (Lower("aot_eager", dumper=str), "does not hold the option 'dumper'"),
        (Lower(Inductor(options={"max_autotune": True})), "holds Inductor"),
        (Recompute(KeepOperators(torch.relu)), "which a file cannot hold"),
        (Own(1.0), "which a file cannot hold"),
        (Mark("stack_trace", "a"), "replaces what torch or Partita keeps in the metadata"),
    ],
    ids=repr,
)
def test_what_a_file_cannot_hold_is_refused(treatment: Any, message: str, tmp_path: Path) -> None:
    plan = partita.plan(_program(), BySize(parts=1), treatment)
    with pytest.raises(PlanFileError, match=message):
        partita.save_plan(plan, tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


#: Tuples of equal hashes: that of -1 is that of -2.
EQUAL_HASHES = [{"tuple": [-1 - (number >> bit & 1) for bit in range(10)]} for number in range(1024)]
REASON = {"text": "a", "kind": "odd", "by": "", "why": "", "nodes": ["relu"]}


def _spoilt(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], Any]:
    def spoil(data: dict[str, Any]) -> Any:
        change(data)
        return data

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: [], "not an object with the keys"),
        (lambda data: {**data, "more": 1}, "not an object with the keys"),
        (_spoilt(lambda data: data.update(version=2)), "reads 'partita plan', version 1"),
        (_spoilt(lambda data: data.update(version=True)), "'version' of"),
        (_spoilt(lambda data: data["regions"][0].update(treatment=7)), "has treatment 7"),
        (_spoilt(lambda data: data["regions"][0].update(treatment=-1)), "has treatment -1"),
        (_spoilt(lambda data: data["regions"][0].update(nodes=[])), "is empty"),
        (_spoilt(lambda data: data["regions"][0].update(nodes=["x"])), "belong to no region"),
        (_spoilt(lambda data: data["regions"][0].update(name='a"b')), "has a quote"),
        (_spoilt(lambda data: data["regions"].append(data["regions"][0])), "two regions are called"),
        (_spoilt(lambda data: data["regions"][0].update(label={"set": [{"list": []}]})), "has a list in it"),
        (_spoilt(lambda data: data["regions"][0].update(label={"tuple": [{"list": []}]})), "has a list in it"),
        (_spoilt(lambda data: data["regions"][0]["nodes"].append("linaer")), "did you mean 'linear'"),
        (_spoilt(lambda data: data["regions"][0]["nodes"].append(3)), "which is no name"),
        (_spoilt(lambda data: data["regions"][0].update(label=1 << 64)), "a number beyond 64 bits"),
        (_spoilt(lambda data: data["regions"][0].update(label={"tuple": ["\x1b[2J"]})), "cannot be printed: '.x1b"),
        (_spoilt(lambda data: data["regions"][0].update(label="\ud800")), "cannot be printed: '.ud800"),
        (_spoilt(lambda data: data["regions"][0].update(name="\u202e")), "cannot be printed: '.u202e"),
        (_spoilt(lambda data: data["regions"][0].update(name="a\xa0b")), "an unprintable character"),
        (_spoilt(lambda data: data["regions"][0].update(label={"set": EQUAL_HASHES})), "more than 100 values"),
        (_spoilt(lambda data: data["regions"][0]["nodes"].extend(data["regions"][0]["nodes"])), "'linear' twice"),
        (_spoilt(lambda data: data["treatments"].append(data["treatments"][0])), "more treatments than regions"),
        (_spoilt(lambda data: data.update(reasons=[REASON])), "of the kind 'odd', which no reason has"),
        (_spoilt(lambda data: data.update(reasons=[{**REASON, "why": "\x1b"}])), "reason 0 has a text that cannot"),
    ],
)
def test_a_spoilt_file_is_refused(spoil: Any, message: str, tmp_path: Path) -> None:
    program, path = _program(), tmp_path / "plan.json"
    partita.save_plan(partita.plan(program, BySize(parts=1), Call()), path)
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    with pytest.raises(PlanFileError, match=message):
        partita.load_plan(path, program)


@pytest.mark.parametrize(
    ("treatment", "message"),
    [
        (3, "is no treatment"),
        ({"class": "KeepAtMost", "options": {"bytes": 3}}, "is no treatment"),
        ({"class": "os.system", "options": {}}, "'os.system', which is not known"),
        ({"class": "Call", "options": {}, "more": 1}, "a value that no plan has"),
        ({"class": "Lower", "options": {"cache": "folder"}}, "no option 'cache' in a file"),
        ({"class": "Lower", "options": {"__class__": "Call"}}, "no option '__class__' in a file"),
        ({"class": "Lower", "options": {"backend": "inducter"}}, "does not take these options"),
        ({"class": "Recompute", "options": {"keep": {"tuple": [{"list": [{}]}]}}}, "a value that no plan has"),
        ({"class": "Mark", "options": {"key": "val", "value": 1}}, "replaces what torch or Partita keeps"),
        ({"class": "Mark", "options": {"key": "recompute", "value": 1}}, "replaces what torch or Partita keeps"),
        ({"class": "Mark", "options": {"key": "partita_folded", "value": 1}}, "replaces what torch or Partita keeps"),
        ({"class": "Mark", "options": {"key": 1, "value": 1}}, "choose another key, a text"),
        ({"class": "Mark", "options": {"key": "k", "value": {"list": ["\r"]}}}, "a text that cannot be printed"),
    ],
)
def test_a_treatment_that_no_plan_has_is_refused(treatment: Any, message: str, tmp_path: Path) -> None:
    program, path = _program(), tmp_path / "plan.json"
    partita.save_plan(partita.plan(program, BySize(parts=1), Call()), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "treatments": [treatment]}))
    with pytest.raises(PlanFileError, match=message):
        partita.load_plan(path, program)


def test_values_that_are_nested_as_deep_as_json_goes_are_refused(tmp_path: Path) -> None:
    """Python's text of such a value recurses too far, from some depth on that Python's reader of JSON still takes."""
    program, path = _program(), tmp_path / "plan.json"
    partita.save_plan(partita.plan(program, BySize(parts=1), Call()), path)
    written = json.dumps({**json.loads(path.read_text()), "treatments": ["here"]})
    mark = '{"class": "Mark", "options": {"key": "a", "value": '
    for depth in range(800, 1000, 4):
        value = "[" * depth + "]" * depth
        path.write_text(written.replace('"here"', f"{mark * 18}{value}{'}}' * 18}"))
        with pytest.raises(PlanFileError):
            partita.load_plan(path, program)


@pytest.mark.parametrize("text", ["", "no json", "[" * 100_000, '{"format": 1e999}'])
def test_a_file_that_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanFileError):
        partita.load_plan(tmp_path / "plan.json", _program())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes")
def test_a_pipe_is_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    # A file may become a pipe after it was looked at.
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    for name in ("pipe", "missing", "half\ud800", "two\nlines"):
        with pytest.raises(PlanFileError, match="is no file; a plan is written by") as caught:
            partita.load_plan(tmp_path / name, _program())
        assert str(caught.value).isprintable()


def test_more_values_than_a_plan_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text("[[], [], {}, []]")
    monkeypatch.setattr("partita.plans.files._MOST_VALUES", 7)
    with pytest.raises(PlanFileError, match="has more than 7 values, which no plan has"):
        partita.load_plan(tmp_path / "plan.json", _program())
    monkeypatch.setattr("partita.plans.files._MOST_BYTES", 5)
    with pytest.raises(PlanFileError, match="has more than 5 bytes, which no plan has"):
        partita.load_plan(tmp_path / "plan.json", _program())


def test_a_plan_is_not_for_a_program_whose_nodes_have_other_names(tmp_path: Path) -> None:
    """Both compute the same, so that their fingerprints are equal; `linear` is another layer in each."""

    class Swapped(nn.Module):
        def __init__(self, *, swapped: bool) -> None:
            super().__init__()
            self.one, self.two, self.swapped = nn.Linear(4, 4), nn.Linear(4, 4), swapped

        def forward(self, x: Tensor) -> Tensor:
            if self.swapped:
                two = self.two(x)
                return self.one(x) - two  # type: ignore[no-any-return]
            return self.one(x) - self.two(x)  # type: ignore[no-any-return]

    one, other = (partita.Program.of(torch.fx.symbolic_trace(Swapped(swapped=is_))) for is_ in (False, True))
    one, other = (partita.capture(program.module(), (X,)) for program in (one, other))
    plan = partita.plan(one, BySize(parts=2), Call())
    partita.save_plan(plan, tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match="for another program"):
        partita.load_plan(tmp_path / "plan.json", other)
    assert "for different programs" in str(plan.diff(partita.plan(other, BySize(parts=2), Call())))


def test_two_classes_of_one_name_are_refused(tmp_path: Path) -> None:
    plan = partita.plan(_program(), BySize(parts=1), Call())
    with pytest.raises(OptionError, match="two classes are called 'Call'"):
        partita.save_plan(plan, tmp_path / "plan.json", classes=[type("Call", (), {})])


def test_what_another_plan_changes() -> None:
    program = _program()
    two = partita.plan(program, BySize(parts=2), Call())
    assert not two.diff(copy.copy(two))
    lowered = partita.plan(program, BySize(parts=2), {"part_0": Call(), "part_1": Lower("eager")})
    assert "puts_back_modes: False -> True" in str(two.diff(partita.Plan(two.partition, two.treatments, True)))
    assert str(two.diff(lowered)) == "  region 'part_1': Call() -> Lower('eager')"
    three = str(two.diff(partita.plan(program, BySize(parts=3), Call())))
    assert "+ region 'part_2', 1 node\n" in three
    assert "region 'part_0': - relu" in three


def test_a_long_treatment_of_many_regions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A printed plan has it in each row, and all rows are as long as the longest."""
    program, path = _program(), tmp_path / "plan.json"
    partita.save_plan(partita.plan(program, BySize(operators=1), Recompute()), path)
    count = len(partita.load_plan(path, program).partition)
    assert count > 1
    monkeypatch.setattr(files, "_MOST_LETTERS", 1_000 * count)
    assert len(partita.load_plan(path, program).partition) == count
    written = json.loads(path.read_text())
    written["regions"][-1]["label"] = "a" * 1_000
    path.write_text(json.dumps(written))
    with pytest.raises(PlanFileError, match=f"too long to be printed for each of {count} regions"):
        partita.load_plan(path, program)


_READS_PLANS_THAT_NAME = """
import json
import sys

import numpy
import torch

import partita
from partita.policies import BySize
from partita.treatments import KeepOperators, Recompute

program = partita.capture(torch.nn.ReLU(), (torch.ones(2),))
partita.save_plan(partita.plan(program, BySize(parts=1), Recompute(KeepOperators("aten.relu"))), "plan.json")
data = json.load(open("plan.json"))
before = set(sys.modules)
for name in sys.argv[1:]:
    data["treatments"][0]["options"]["keep"]["options"]["operators"] = {"tuple": [name]}
    json.dump(data, open("plan.json", "w"))
    try:
        plan = partita.load_plan("plan.json", program)
        print(plan)
        plan.apply()
    except partita.errors.PartitaError as error:
        print(error)
assert before == set(sys.modules), set(sys.modules) - before
"""


def test_operators_that_a_file_names_are_looked_up_without_imports(tmp_path: Path) -> None:
    names = ("torch.onnx", "torch.onnx.x", "numpy.f2py.x", "torch.classes.foo.Bar", "aten.relu.__init__.__globals__")
    subprocess.run([sys.executable, "-c", _READS_PLANS_THAT_NAME, *names], check=True, cwd=tmp_path)
