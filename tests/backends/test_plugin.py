"""A backend of another package: installed with pip, found by its name, checked, and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from partita.backends import backend_names, find_backend
from partita.errors import OptionError

PLUGIN = Path(__file__).parent / "plugin"

_FINDS = """
from partita.backends import backend_names, find_backend
assert "numpy" in backend_names()
backend = find_backend("numpy")
print(type(backend).__module__, backend)
"""

_LOWERS = """
import torch
import partita
from partita.policies import ByCapability
from partita.treatments import Lower

class Model(torch.nn.Module):
    def forward(self, x, weight):
        hidden = torch.sin(x) * x + torch.cos(x)
        return torch.tanh(hidden @ weight) - 1

args = (torch.randn(3, 4), torch.randn(4, 4))
program = partita.capture(Model(), args)
plan = partita.plan(program, ByCapability("numpy"), Lower("numpy", strict=True))
print(plan)
print([str(reason) for reason in plan.partition.reasons.values()])
with torch.no_grad():
    partita.verify(program, plan.apply(), args, gradients=False)
print("failures", len(plan.failures))
"""

_TRAINS = """
import torch
import partita
from partita.policies import ByCapability
from partita.treatments import Lower

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x) * x

args = (torch.randn(3, 4, requires_grad=True),)
program = partita.capture(Model(), args)
plan = partita.plan(program, ByCapability("numpy"), Lower("numpy"))
partita.verify(program, plan.apply(), args)
print("failures", [str(failure) for failure in plan.failures])
"""

_CHECKS = """
from partita.testing import check_backend
from partita_numpy import NumPy
print(check_backend("numpy", programs=5))
try:
    check_backend(NumPy(largest=8), programs=2)
except AssertionError as error:
    print(error)
"""


_SCRIPTS = (_FINDS, _LOWERS, _TRAINS, _CHECKS)

#: Runs scripts one after the other, each in a namespace of its own, and prints a list of what they print.
_RUNS_ALL = """
import contextlib, io, json, sys
told = []
for script in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    told.append(printed.getvalue())
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script prints where the plug-in is installed by pip; nothing is fetched, and one process runs all."""
    folder = tmp_path_factory.mktemp("site")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    _run("-m", "pip", "install", *options, "--target", str(folder), str(PLUGIN))
    printed = json.loads(_run("-c", _RUNS_ALL, *_SCRIPTS, site=folder).splitlines()[-1])
    return dict(zip(_SCRIPTS, printed, strict=True))


def test_an_installed_backend_is_found_by_its_name(told: dict[str, str]) -> None:
    assert told[_FINDS].split() == ["partita_numpy", "NumPy(largest=1048576)"]


def test_what_is_not_installed_is_not_found() -> None:
    assert "numpy" not in backend_names()
    with pytest.raises(OptionError, match="numpy"):
        find_backend("numpy")


def test_an_installed_backend_computes_what_it_takes(told: dict[str, str]) -> None:
    text = told[_LOWERS]
    assert "numpy_0" in text
    assert "numpy_1" in text
    assert "not one of the operators that it has" in text
    assert "failures 0" in text


def test_a_region_that_needs_gradients_runs_without_a_backend_that_has_none(told: dict[str, str]) -> None:
    assert "gradient" in told[_TRAINS]


def test_an_installed_backend_passes_the_check(told: dict[str, str]) -> None:
    text = told[_CHECKS]
    assert "numpy: all laws hold" in text
    assert "numpy: 1 law broken" in text
    assert "20 elements, more than 8" in text


def _run(*arguments: str, site: Path | None = None) -> str:
    environment = {**os.environ, **({} if site is None else {"PYTHONPATH": str(site)})}
    command = [sys.executable, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout
