"""The operators with a body beside the plain context managers that they must equal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.helpers.processes import run_in_new_process
from torch import nn

from partita import hops


@dataclass(frozen=True)
class Case:
    """One operator with the arguments of its mode, and the same in plain Python."""

    operator: Any
    mode: tuple[Any, ...]
    context: Callable[[], AbstractContextManager[Any]]

    def call(self, body: Any, /, *operands: Any, **keywords: Any) -> Any:
        return self.operator(*self.mode, body, *operands, **keywords)

    def plainly(self, body: Any, /, *operands: Any, **keywords: Any) -> Any:
        with self.context():
            return body(*operands, **keywords)


CASES = {
    "call": Case(hops.call, (), nullcontext),
    "wrap": Case(hops.wrap, (), nullcontext),
    "grad_off": Case(hops.wrap_with_set_grad_enabled, (False,), lambda: torch.set_grad_enabled(False)),
    "grad_on": Case(hops.wrap_with_set_grad_enabled, (True,), lambda: torch.set_grad_enabled(True)),
    "autocast": Case(hops.wrap_with_autocast, ("cpu", None, True, None), lambda: torch.autocast("cpu")),
    "autocast_off": Case(
        hops.wrap_with_autocast, ("cpu", None, False, None), lambda: torch.autocast("cpu", enabled=False)
    ),
    "inference": Case(hops.wrap_with_inference_mode, (True,), lambda: torch.inference_mode(True)),
    "no_inference": Case(hops.wrap_with_inference_mode, (False,), lambda: torch.inference_mode(False)),
}


class Regions(nn.Module):
    """A block of a model that a test gives a runner: the operator, or the plain context manager."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def inner(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        return {"y": torch.tanh(self.second(x)) * scale, "nothing": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        inside = self.run(self.inner, h, scale=0.5)["y"]
        return (h + inside).sum(-1)


def printed_by_new_process(source: str) -> str:
    """What is printed by a process that has imported torch and its tracers."""
    finished = run_in_new_process(source, folder=Path(__file__).parents[2])
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def run_python(source: str) -> str:
    """What a fresh process prints."""
    command = [sys.executable, "-c", source]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A module whose weights are the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients of one training step, of the input first."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    module(x).sum().backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def assert_equal(found: Any, expected: Any) -> None:
    """Bitwise, with None for None."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))
