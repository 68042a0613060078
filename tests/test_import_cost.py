"""`import partita` is quick: it brings nothing heavy that `import torch` has not brought, nor does its backend."""

from __future__ import annotations

import subprocess
import sys

import pytest

import partita
from partita import compat

HEAVY = (
    *("sympy", "torch._dynamo", "torch._functorch", "torch._inductor", "torch.distributed", "torch.utils._sympy"),
    *("hypothesis", "transformers"),
)
#: Our own packages that most programs need, but not at once.
LATER = (
    *("partita.backends", "partita.equivalence", "partita.lowering", "partita.memory", "partita.policies"),
    *("partita.testing", "partita.torch_compile", "partita.treatments"),
    "partita.program.archives",
)

_NEWLY_IMPORTED = """
import sys
import torch
before = set(sys.modules)
import {module}
print(*sorted(set(sys.modules) - before), sep="\\n")
"""


def test_importing_partita_brings_nothing_heavy_and_only_the_packages_that_a_plan_needs() -> None:
    brought = _newly_imported("partita")
    assert "partita.plans.plan" in brought
    assert [name for name in brought if _is_in(name, (*HEAVY, *LATER))] == []


def test_importing_the_backend_of_torch_compile_brings_nothing_heavy() -> None:
    brought = _newly_imported("partita.torch_compile")
    assert "partita.torch_compile.backend" in brought
    assert [name for name in brought if _is_in(name, HEAVY)] == []


def test_names_that_are_imported_at_their_first_use_are_listed_and_found() -> None:
    packages = ["equivalence", "policies", "recompute", "treatments"]
    assert {*partita.__all__, *packages} <= {*dir(partita)}
    printed = _run("import partita\nprint(partita.compare.__module__, partita.policies.__name__)")
    assert printed.split() == ["partita.equivalence.compare", "partita.policies"]
    for package in packages:
        assert _run(f"import partita\nprint(partita.{package}.__name__)").split() == [f"partita.{package}"]


@pytest.mark.parametrize("package", [partita, compat])
def test_a_name_that_is_not_there_is_an_attribute_error_that_names_the_package(package: object) -> None:
    with pytest.raises(AttributeError, match=r"module 'partita[.a-z]*' has no attribute 'nothing'"):
        package.nothing  # type: ignore[attr-defined]  # noqa: B018


def _newly_imported(module: str) -> list[str]:
    return _run(_NEWLY_IMPORTED.format(module=module)).split()


def _run(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def _is_in(module_name: str, packages: tuple[str, ...]) -> bool:
    return any(module_name == package or module_name.startswith(package + ".") for package in packages)
