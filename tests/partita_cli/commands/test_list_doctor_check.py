"""`partita list`, `partita doctor` and `partita check-backend`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.partita_cli.helpers import refused, run

from partita.backends import backend, backend_names
from partita_cli.commands import doctor


def test_list_has_policies_treatments_and_backends() -> None:
    found = run("list", "--json").json
    assert list(found) == ["policies", "treatments", "keep", "backends"]
    assert {one["name"] for one in found["backends"]} == set(backend_names())
    shown = run("list").out
    assert all(f"  {one['name']} " in shown for entries in found.values() for one in entries)
    policies = run("list", "policies").out
    assert policies.startswith("policies\n")
    assert "options: key (required), allow_empty; from partita, ByAnnotation\n" in policies


def test_list_tells_all_about_one_name() -> None:
    shown = run("list", "capability").out
    assert shown.startswith("policy capability (partita, ByCapability)\n")
    lines = [line.split(maxsplit=2) for line in shown.splitlines()]
    assert ["min_size", "1", "whole number"] in lines
    assert ["capabilities", "required", "texts"] in lines
    assert ["apart", "none", "a function, in Python only"] in lines
    assert "--policy capability:capabilities=..." in shown
    both = run("list", "mode").out
    assert "policy mode" in both
    assert "treatment mode" in both
    assert run("list", "inductor", "--json").json[0]["kind"] == "backend"


def test_an_unknown_name_suggests_the_nearest() -> None:
    assert "did you mean 'capability'" in refused("list", "capabilities")


@pytest.fixture
def command_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file that registers a backend, in the current folder."""
    monkeypatch.setattr(backend, "_REGISTERED", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "command_backend.py").write_text(
        "from dataclasses import dataclass\n"
        "from partita.backends import register_backend\n\n"
        "@dataclass(frozen=True)\n"
        "class Slow:\n"
        '    """Runs the body, slowly."""\n'
        "    name: str = 'slow'\n\n"
        "    def refusal(self, node):\n"
        "        return None\n\n"
        "    def compile(self, body, inputs):\n"
        "        return body\n\n"
        "register_backend(Slow())\n"
    )
    yield
    sys.modules.pop("command_backend")


@pytest.mark.usefixtures("command_backend")
def test_list_has_backends_of_a_module_that_is_imported() -> None:
    shown = run("list", "backends", "--import", "command_backend").out
    assert "slow          Runs the body, slowly." in shown


@pytest.mark.usefixtures("command_backend")
def test_a_file_that_registers_a_backend_is_run_once(small_file: Path) -> None:
    """A command imports before it reads the words of a plan, and again before it reads a program."""
    words = ("-p", "capability:slow", "-t", "lower:slow", "--import", "command_backend.py")
    assert run("plan", small_file, *words, "--summary").status == 0
    assert run("verify", small_file, *words).status == 0


def test_doctor_tells_what_works_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    ran = run("doctor")
    assert ran.status == 0
    assert "C++ compiler" in ran.out.partition("missing")[2]
    assert "install g++" in ran.out
    found = {check["name"]: check for check in run("doctor", "--json").json}
    assert found["torch"]["fine"]
    assert found["backend eager"]["fine"]


def test_doctor_works_where_torch_is_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_OLDEST_TORCH", (99, 0))
    ran = run("doctor")
    assert ran.status == 1
    assert "Partita cannot run here: torch" in ran.out
    monkeypatch.setitem(sys.modules, "torch", None)
    ran = run("doctor")
    assert ran.status == 1
    assert "cannot be imported" in ran.out


def test_check_backend_tells_whether_the_laws_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run("check-backend", "eager", "--programs", 0, "--body", "arithmetic")
    if ran.status == 2:  # The bodies have other names.
        pytest.fail(ran.err)
    assert ran.status == 0
    assert ran.out.startswith("eager: all laws hold in ")


def test_a_missing_backend_is_refused_with_near_names() -> None:
    assert "'inductor'" in refused("check-backend", "inducter")
