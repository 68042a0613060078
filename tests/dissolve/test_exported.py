"""`run_decompositions` of an exported program keeps what its modes mean, or says that it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partita import Program, capture, dissolve, verify
from partita.errors import ModeError, SignatureError

X = torch.randn(3, 4)


class Frozen(nn.Module):
    """The first layer learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.first(x)
        return self.second(hidden)


class WritesUnderNoGrad(Frozen):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            hidden.mul_(2)
        return hidden


class WritesDetached(Frozen):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden.detach().add_(1)
        return hidden * 2


class CellUnderAutocast(nn.Module):
    """Autocast reaches into the cell, which comes down to operators that write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: torch.Tensor = self.cell(x)
        return result


class BilinearUnderAutocast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.bilinear(x, x, x.new_ones(2, 4, 4))


@pytest.mark.parametrize("source", ["captured", "exported by torch"])
def test_a_frozen_weight_stays_frozen_however_often_it_is_decomposed(source: str) -> None:
    model = Frozen()
    program = capture(model, (X,)) if source == "captured" else Program.of(torch.export.export(model, (X,)))
    for exported in (
        program.exported().run_decompositions(),
        program.exported().run_decompositions().run_decompositions(),
    ):
        module = exported.module()
        module(X).sum().backward()
        assert module.first.weight.grad is None
        assert module.second.weight.grad is not None


class StopsGradients(Frozen):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).detach())


@pytest.mark.parametrize("model", [StopsGradients(), CellUnderAutocast()])
def test_values_and_gradients_are_those_of_the_model(model: nn.Module) -> None:
    decomposed = capture(model, (X,)).exported().run_decompositions()
    verify(model, decomposed.module(), (X,), no_grad_call=False)


class WritesBuffer(Frozen):
    """A buffer gets a value with gradients; one that comes from a file is a view (torch 2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.total.add_(hidden.sum(0))
        return self.second(hidden) + self.total


def test_a_decomposed_program_from_a_file_that_writes_buffers_is_verified(tmp_path: Path) -> None:
    program = capture(WritesBuffer(), (X,))
    torch.export.save(program.exported().run_decompositions(), tmp_path / "writes.pt2")
    found = verify(program, Program.of(tmp_path / "writes.pt2"), (X,))
    assert found.raised == 0


@pytest.mark.parametrize("around", [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad, torch.inference_mode])
def test_the_modes_that_a_program_is_decomposed_under_make_no_difference(around: Any) -> None:
    model = Frozen()
    exported = capture(model, (X,)).exported()
    with around():
        decomposed = exported.run_decompositions()
    verify(model, decomposed.module(), (X,))


def test_a_dissolved_program_stays_frozen(tmp_path: Path) -> None:
    torch.export.save(dissolve(capture(Frozen(), (X,))).exported(), tmp_path / "frozen.pt2")
    module = Program.of(tmp_path / "frozen.pt2").exported().run_decompositions().module()
    module(X).sum().backward()
    assert module.first.weight.grad is None


@pytest.mark.parametrize("model", [WritesUnderNoGrad(), WritesDetached()])
def test_a_write_into_a_value_with_gradients_past_autograd_is_refused(model: nn.Module) -> None:
    exported = capture(model, (X,)).exported()
    with pytest.raises(ModeError, match=r"'(mul_|add_)' mutates a tensor that gradients flow through"):
        exported.run_decompositions()
    assert torch.export.ExportedProgram.run_decompositions(exported).module()(X).shape == (3, 4)


def test_casts_that_nobody_can_see_are_refused() -> None:
    with pytest.raises(ModeError, match="'bilinear' calls"):
        capture(BilinearUnderAutocast(), (X,)).exported().run_decompositions()


class Shared(nn.Module):
    """One batch norm under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(4)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).sin())


def write_into_a_row(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    row.add_(1)
    return x.sin()


def test_a_program_that_mutates_what_has_two_names_is_refused() -> None:
    for model, args, name in ((Shared(), (X,), "first.running_mean"), (write_into_a_row, (X, X[0]), "row")):
        program = capture(model, args)
        with pytest.raises(SignatureError, match=f"share memory: .*'{name}'"):
            program.decomposed()
        with pytest.raises(SignatureError, match="share memory"):
            program.exported().run_decompositions()
    assert capture(Shared().eval(), (X,)).decomposed().module()(X).shape == X.shape
