"""Comparisons of programs whose tensors wrap others: DTensors on one process and on two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.processes import run_on_ranks
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx import symbolic_trace

from partita import Program, compare, plan, verify
from partita.policies import BySize
from partita.treatments import Call

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


class Spread(nn.Module):
    """A parameter that is spread over processes, and a count that every process has."""

    count: Tensor

    def __init__(self, mesh: DeviceMesh, *, scale: float = 1.0, placement: Any = None, steps: int = 1) -> None:
        super().__init__()
        weight = torch.arange(16.0).reshape(4, 4) * scale / 8
        self.mesh, self.steps = mesh, steps
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [placement or Shard(0)]))
        self.register_buffer("count", distribute_tensor(torch.zeros(4), mesh, [Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(self.steps)
        spread = DTensor.from_local(x, self.mesh, [Replicate()])
        return ((spread @ self.weight).sin() * self.count).full_tensor()


class GivesDTensor(Spread):
    def forward(self, x: Tensor) -> Tensor:
        return DTensor.from_local(x, self.mesh, [Replicate()]) @ self.weight


def test_a_module_with_dtensors_means_the_same_as_itself_and_is_left_as_it_was(mesh: DeviceMesh) -> None:
    model = Spread(mesh)
    weight, local = model.weight, model.count._local_tensor  # type: ignore[union-attr]
    comparison = verify(model, model, (X,))
    assert comparison.calls == 3
    assert comparison.raised == 0
    assert model.weight is weight
    assert model.weight.grad is None
    assert model.count._local_tensor is local  # type: ignore[union-attr]
    assert torch.equal(local, torch.zeros(4))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, set()),
        (
            {"scale": 2.0},
            {("value", "output"), ("gradient", "'weight'"), ("value", "parameter 'weight'._local_tensor")},
        ),
        ({"placement": Replicate()}, {("placements", "parameter 'weight'")}),
        ({"steps": 2}, {("value", "output"), ("gradient", "'weight'"), ("value", "buffer 'count'._local_tensor")}),
    ],
    ids=["nothing", "scale", "placement", "steps"],
)
def test_what_differs_in_dtensors_is_found(mesh: DeviceMesh, options: dict[str, Any], found: set[Any]) -> None:
    comparison = compare(Spread(mesh), Spread(mesh, **options), (X,))
    assert {(difference.kind, difference.where) for difference in comparison.differences} == found


def test_results_that_are_dtensors_are_compared_where_they_are(mesh: DeviceMesh) -> None:
    assert compare(GivesDTensor(mesh), GivesDTensor(mesh), (X,)).equal
    comparison = compare(GivesDTensor(mesh), GivesDTensor(mesh, scale=2.0), (X,))
    assert ("value", "output._local_tensor") in {(found.kind, found.where) for found in comparison.differences}


def test_dtensors_as_arguments_are_copied_where_they_are_mutated(mesh: DeviceMesh) -> None:
    def writing(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    given = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    assert compare(writing, writing, (given,)).equal
    comparison = compare(writing, lambda x: (x + 1) * 2, (given,))
    assert [found.where for found in comparison.differences] == ["input[0] after the call._local_tensor"]
    assert torch.equal(given.full_tensor(), torch.arange(8.0))


def test_a_program_with_dtensors_can_be_cut_and_verified(mesh: DeviceMesh) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0)]))

        def forward(self, x: Tensor) -> Tensor:
            return ((x @ self.weight).sin() @ self.weight).relu()

    program = Program.of(symbolic_trace(Layers()))
    given = distribute_tensor(X, mesh, [Replicate()])
    verify(program, plan(program, BySize(parts=2), Call()).apply(), (given,))


def _on_each_rank(rank: int, store: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = Spread(mesh)
        verify(model, Spread(mesh), (X,))
        comparison = compare(model, Spread(mesh, placement=Replicate()), (X,))
        kinds = {(found.kind, found.where) for found in comparison.differences}
        assert {("placements", "parameter 'weight'"), ("shape", "parameter 'weight'._local_tensor")} <= kinds
        assert torch.equal(model.count.full_tensor(), torch.zeros(4))  # type: ignore[union-attr]
    finally:
        distributed.destroy_process_group()


def test_two_processes_compare_their_parts(tmp_path: Path) -> None:
    run_on_ranks(_on_each_rank, str(tmp_path / "store"))
