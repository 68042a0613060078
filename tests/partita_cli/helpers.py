"""Runs commands in this process, on files of small models."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from json import loads
from pathlib import Path
from typing import Any

import torch
from torch import nn

import partita
from partita_cli import main


@dataclass(frozen=True)
class Ran:
    """The status of a command, and what it printed."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return loads(self.out)


def run(*words: object) -> Ran:
    """Runs a command."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([str(word) for word in words])
    return Ran(status, out.getvalue(), err.getvalue())


def refused(*words: object) -> str:
    """The one line with which a command refuses its input."""
    ran = run(*words)
    assert ran.status == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("partita: ")
    assert ran.err.count("\n") == 1, ran.err
    return ran.err.removeprefix("partita: ").rstrip()


class Counting(nn.Module):
    """Token ids in, logits out: four equal blocks, dropout, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.add_(ids.numel())
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model and its inputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (torch.randn(4, 8),)


def counting() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model with state and random numbers, and its inputs."""
    torch.manual_seed(0)
    return Counting().train(), (torch.randint(11, (2, 3)),)


def saved(made: tuple[nn.Module, tuple[torch.Tensor, ...]], path: Path, **options: Any) -> Path:
    """The file of a captured model."""
    model, args = made
    partita.capture(model, args, **options).save(path)
    return path
