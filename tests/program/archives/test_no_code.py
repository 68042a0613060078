"""No code is made of texts: what the reader of archives does not even name, and what a load does not do."""

from __future__ import annotations

import ast
import builtins
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from tests.helpers.processes import run_in_new_process
from tests.program.archives.helpers import call, exported
from torch.utils import _pytree as pytree

import partita
from partita import Program
from partita.compat.split_module import split_module
from partita.errors import ArchiveError, RegionError
from partita.program.archives import load_exported

SOURCE = Path(partita.__file__).parent
READER = [
    *(SOURCE / "program" / "archives").rglob("*.py"),
    SOURCE / "_torch" / "expressions.py",
    SOURCE / "program" / "_torch" / "guards.py",
    SOURCE / "lowering" / "_torch" / "guards.py",
]
#: Ways from a text or bytes to code; `load` is asked for apart.
FORBIDDEN = frozenset(
    (
        *(
            "exec",
            "eval",
            "compile",
            "__import__",
            "import_module",
            "literal_eval",
            "sympify",
            "parse_expr",
            "lambdify",
        ),
        *("pickle", "Unpickler", "marshal", "shelve", "treespec_loads", "runpy", "ctypes"),
    )
)


def named(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Every name that is read or imported, with what it is read from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield "", node.id
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (("", part) for alias in node.names for part in alias.name.split("."))
            yield from (("", part) for part in (getattr(node, "module", None) or "").split("."))


@pytest.mark.parametrize("file", READER, ids=lambda file: file.name)
def test_the_reader_names_nothing_that_makes_code_of_texts(file: Path) -> None:
    found = {(owner, name) for owner, name in named(ast.parse(file.read_text())) if name in FORBIDDEN}
    assert found <= {("re", "compile")}


def test_torch_loads_trusted_files_only() -> None:
    """`torch.export.load` is named in one file, whose function one branch of the reader calls; laws load their own."""
    everywhere = {file: set(named(ast.parse(file.read_text()))) for file in SOURCE.rglob("*.py")}
    loading = [file for file, names in everywhere.items() if ("torch.export", "load") in names]
    assert [file.name for file in loading if "testing" not in file.parts] == ["trusted_archives.py"]
    assert not any(name == "load" for file in READER for _, name in everywhere[file])
    calling = [file for file, names in everywhere.items() if ("", "load_trusted") in names]
    assert {file.name for file in calling} == {"loading.py"}
    tree = ast.parse(calling[0].read_text())
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "trusted"]
    inside = [node for branch in branches for step in branch.body for node in ast.walk(step)]
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "load_trusted"]
    assert len(uses) == 1
    assert uses[0] in inside


def test_no_source_is_executed_anywhere() -> None:
    found = []
    for file in SOURCE.rglob("*.py"):
        called = (node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
        found += [file.name for func in called if isinstance(func, ast.Name) and func.id in ("exec", "eval")]
    assert found == []


def test_a_load_neither_unpickles_nor_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.export.save(exported(), tmp_path / "m.pt2")
    torch.export.load(tmp_path / "m.pt2")  # It does all of this; nothing is imported late below.

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a file was taken as more than data")

    for owner, name in (
        (sympy, "sympify"),
        (pickle, "Unpickler"),
        (pickle, "loads"),
        (torch, "load"),
        (torch.export, "load"),
        (pytree, "treespec_loads"),
        (builtins, "eval"),
    ):
        monkeypatch.setattr(owner, name, never)
    loaded = load_exported(tmp_path / "m.pt2")
    monkeypatch.undo()
    call(Program.of(loaded).exported())


@pytest.mark.parametrize("letter", ['"', "\\", "\n", "\0"], ids=["quote", "backslash", "line break", "null"])
def test_a_region_is_not_named_by_what_could_end_a_string(letter: str) -> None:
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    with pytest.raises(RegionError, match="quote, a backslash or an unprintable"):
        partita.Region(f"a{letter}b", tuple(Program.of(traced).operators()))
    with pytest.raises(RegionError, match="its label or affix"):
        split_module(traced, None, lambda node: 0, partition_affix=f"x{letter}")


# What is not the file's fault ------------------------------------------------------------------------------------


def test_too_little_memory_is_not_blamed_on_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.export.save(exported(), tmp_path / "m.pt2")

    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(torch, "frombuffer", full)
    with pytest.raises(MemoryError):
        load_exported(tmp_path / "m.pt2")


@pytest.mark.parametrize("trusted", [False, True])
def test_a_tensor_that_does_not_fit_into_memory_is_not_blamed_on_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, trusted: bool
) -> None:
    torch.export.save(exported(), tmp_path / "m.pt2")

    def full(*_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(1 << 60, dtype=torch.uint8)  # More than any machine has.

    monkeypatch.setattr(*(torch.export, "load") if trusted else (torch.Tensor, "to"), full)
    with pytest.raises(RuntimeError, match="allocate") as caught:
        load_exported(tmp_path / "m.pt2", trusted=trusted)
    assert not isinstance(caught.value, ArchiveError)


def test_a_disk_that_cannot_be_read_is_not_blamed_on_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.export.save(exported(), tmp_path / "m.pt2")

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(zipfile.ZipExtFile, "read", fails)
    with pytest.raises(OSError, match="Input/output error") as caught:
        load_exported(tmp_path / "m.pt2")
    assert not isinstance(caught.value, ArchiveError)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    code = (
        "import os, sys, partita\n"
        "os.mkfifo(sys.argv[1])\n"
        "for path in (sys.argv[1], '/dev/zero'):\n"
        "    for trusted in (False, True):\n"
        "        try: partita.Program.of(path, trusted=trusted)\n"
        "        except partita.errors.ArchiveError as error: print(error)\n"
    )
    finished = run_in_new_process(code, tmp_path / "pipe")
    lines = finished.stdout.splitlines()
    assert len(lines) == 4
    assert all("is a pipe, a socket or a device; copy" in line for line in lines)
