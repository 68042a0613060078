"""What the tests of archives share: programs to save, and a saved one to spoil member by member."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

X = torch.linspace(-1, 1, 24).reshape(6, 4)


class Plain(nn.Module):
    """Parameters, buffers of both kinds, a constant, tied weights, a branch, a mode, keywords and nested inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.linear.weight
        self.named = nn.ModuleDict({"a-b": nn.Linear(4, 4, bias=False)})
        self.register_buffer("saved", torch.full((4,), 2.0))
        self.register_buffer("fleeting", torch.full((4,), 3.0), persistent=False)
        self.constant = torch.arange(4.0)
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor, pair: dict[str, Tensor], *, scale: float, mode: str = "sum") -> dict[str, Any]:
        with torch.no_grad():
            still = self.linear(x).sin()
        chosen = torch.cond(x.sum() > 0, lambda t: t.cos(), lambda t: t.sin(), (still,))
        self.saved.add_(1)
        out = self.tied(chosen) * scale + self.saved + self.fleeting * self.constant + self.named["a-b"](pair["k"])
        return {"out": out, "half": x.shape[0] // 2, "flat": x.reshape(-1), "empty": self.empty * 2}


def exported(*, dynamic: bool = True) -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=2, max=100)
    shapes = {"x": {0: rows}, "pair": {"k": {0: rows}}, "scale": None, "mode": None} if dynamic else None
    return torch.export.export(Plain(), (X, {"k": X + 1}), {"scale": 2.0, "mode": "sum"}, dynamic_shapes=shapes)


def call(program: torch.export.ExportedProgram, rows: int = 6) -> Any:
    x = torch.linspace(-1, 1, rows * 4).reshape(rows, 4)
    return program.module()(x, {"k": x}, scale=2.0, mode="sum")


class Spoilt:
    """The members of an archive, to be changed and written again."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            self.root = archive.namelist()[0].partition("/")[0]
            self.members = {name.removeprefix(f"{self.root}/"): archive.read(name) for name in archive.namelist()}

    def json(self, member: str, change: Callable[[Any], Any]) -> None:
        parsed = json.loads(self.members[member])
        change(parsed)
        self.members[member] = json.dumps(parsed).encode()

    def program(self, change: Callable[[Any], Any]) -> None:
        self.json("models/model.json", change)

    def text(self, old: str, new: str) -> None:
        """Replaces a text of the program, as it stands between JSON's quotes, wherever it stands."""
        before = self.members["models/model.json"].decode()
        quoted = json.dumps(old), json.dumps(new)
        assert quoted[0] in before, old
        self.members["models/model.json"] = before.replace(*quoted).encode()

    def write(self, path: Path, *, compression: int = zipfile.ZIP_STORED) -> Path:
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, data in self.members.items():
                archive.writestr(f"{self.root}/{name}", data)
        return path


class Touching:
    """A pickle of this runs a command when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def pickled_by_torch(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def poison(canary: Path) -> bytes:
    """A file of torch.save that runs a command."""
    return pickled_by_torch((Touching(canary), {}))


def plain_poison(canary: Path) -> bytes:
    """A bare pickle that runs a command, by an opcode of a newer protocol."""
    return pickle.dumps(Touching(canary), protocol=4)
