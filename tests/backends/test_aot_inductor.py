"""AOTInductor: native code that takes numbers and symbols, is stored, and runs where there is no compiler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.helpers import compiled
from tests.helpers.processes import run_in_new_process
from torch import Tensor, nn
from torch.fx import symbolic_trace

import partita
from partita.backends import AotInductor
from partita.backends.adapting import CompiledBody
from partita.policies import ByCapability
from partita.testing import check_backend
from partita.treatments import Lower

#: The code around the kernels is not worth optimising here.
QUICK = AotInductor({"aot_inductor.compile_wrapper_opt_level": "O0"})

_RUNS_ALONE = """
import sys, torch
from partita.backends import AotInductor
function = AotInductor().load(open(sys.argv[1], "rb").read())
total = torch.zeros(6, 3)
results = function(torch.ones(6, 3), total, 5)
torch.save((results, total), sys.argv[2])
"""

_RUNS_A_PROGRAM = """
import sys, torch
program = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    torch.save(program(torch.ones(3, 4)), sys.argv[2])
"""


def body(x: Tensor, total: Tensor, factor: int) -> tuple[Any, ...]:
    total.add_(x)
    return torch.exp(torch.sin(x)) * factor, x.size(0) * 2, x.size(0) * 0.5, factor + 1, None, torch.sum(total), 2.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + x


@pytest.fixture(scope="module")
def function() -> CompiledBody:
    made = compiled(QUICK, body, (torch.ones(4, 3), torch.zeros(4, 3), 3), symbols=True)
    assert isinstance(made, CompiledBody)
    return made


@pytest.mark.parametrize(("rows", "factor"), [(4, 3), (6, 3), (7, 7)])
def test_one_function_serves_all_sizes_and_numbers(function: CompiledBody, rows: int, factor: int) -> None:
    totals = [torch.ones(rows, 3), torch.ones(rows, 3)]
    x = torch.randn(rows, 3)
    found, expected = function(x, totals[0], factor), body(x, totals[1], factor)
    assert list(found[1:5]) == list(expected[1:5]) == [rows * 2, rows * 0.5, factor + 1, None]
    assert [type(value) for value in found] == [type(value) for value in expected]
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(totals[0], totals[1])
    torch.testing.assert_close(found[5], expected[5])


def test_what_is_stored_runs_without_a_compiler(function: CompiledBody, tmp_path: Path) -> None:
    (tmp_path / "code").write_bytes(QUICK.save(function))
    results, total = _elsewhere(_RUNS_ALONE, tmp_path)
    expected_total = torch.zeros(6, 3)
    expected = body(torch.ones(6, 3), expected_total, 5)
    torch.testing.assert_close(results[0], expected[0])
    assert list(results[1:5]) == list(expected[1:5])
    assert torch.equal(total, expected_total)


def test_a_lowered_program_is_moved_and_runs_without_a_compiler(tmp_path: Path) -> None:
    args = (torch.ones(3, 4),)
    program = partita.Program.of(symbolic_trace(Model()))
    plan = partita.plan(program, ByCapability(QUICK), Lower(QUICK, strict=True))
    lowered = plan.apply().module()
    with torch.no_grad():
        expected = lowered(*args)
        torch.testing.assert_close(expected, program.module()(*args))
    torch.save(lowered, tmp_path / "code")
    assert torch.equal(_elsewhere(_RUNS_A_PROGRAM, tmp_path), expected)


@pytest.mark.slow
def test_the_laws_hold_for_aot_inductor_on_a_few_bodies() -> None:
    bodies = ("accumulation", "views", "plain_inputs", "random_numbers")
    report = check_backend(QUICK, programs=0, bodies=bodies)
    assert not [note for note in report.notes if "failed" in note]


def _elsewhere(source: str, folder: Path) -> Any:
    """What a script makes of a file, in a process without a compiler or anything cached."""
    environment = {
        **os.environ,
        "CXX": "false",
        "PATH": "",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    finished = run_in_new_process(source, folder / "code", folder / "results", environment=environment)
    assert finished.returncode == 0, finished.stderr
    return torch.load(folder / "results", weights_only=False)
