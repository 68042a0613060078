"""Graphs say what they write, which of their sizes are free and what their outputs are called; comparisons use that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.fx import Graph, GraphModule, symbolic_trace

from partita.equivalence import compare, verify
from partita.program.program import Program


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"normal": self.norm(self.linear(x))}


def exported(model: nn.Module, *args: Any, **options: Any) -> GraphModule:
    module = export(model, args, **options).module(check_guards=False)
    assert isinstance(module, GraphModule)
    return module


@pytest.fixture
def copied_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all storages copied since the test began."""
    sizes: list[int] = []
    clone = torch.UntypedStorage.clone

    def counting(storage: torch.UntypedStorage) -> Any:
        sizes.append(storage.nbytes())
        return clone(storage)

    monkeypatch.setattr(torch.UntypedStorage, "clone", counting)
    return sizes


def test_a_traced_program_equals_its_module() -> None:
    model = Normalised()
    assert verify(model, symbolic_trace(model), (torch.randn(4, 64),)).notes == ()


def test_only_what_may_be_mutated_is_copied(copied_bytes: list[int]) -> None:
    program = Program.of(symbolic_trace(Normalised()))
    assert verify(program, program, (torch.randn(4, 64),), second_call=False).equal
    assert sorted(copied_bytes) == [8, 256, 256]


def test_nothing_is_copied_where_nothing_is_mutated(copied_bytes: list[int]) -> None:
    program = Program.of(exported(nn.Linear(64, 64), torch.randn(4, 64)))
    assert verify(program, program, (torch.randn(4, 64),), second_call=False).equal
    assert copied_bytes == []


def test_inputs_that_a_graph_writes_are_copied(copied_bytes: list[int]) -> None:
    class Writing(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(y)
            return x * y

    program = Program.of(exported(Writing(), torch.ones(4), torch.ones(4)))
    x = torch.ones(4)
    assert verify(program, program, (x, torch.ones(4)), second_call=False, no_grad_call=False).equal
    assert copied_bytes == [16, 16]
    assert x.tolist() == [1.0] * 4


def test_an_undeclared_write_is_reported() -> None:
    def sly(x: Tensor) -> Tensor:
        return x.add_(1) * 1

    graph = Graph()
    graph.output(graph.call_function(sly, (graph.placeholder("x"),)))
    program = Program.of(GraphModule(nn.Module(), graph), pure=[sly])
    kinds = {difference.kind for difference in compare(program, program, (torch.ones(3),)).differences}
    assert "undeclared mutation" in kinds


def test_free_sizes_are_tried_with_other_numbers() -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.sum() + torch.cat([x, y]).mean(0) * x.shape[0]

    args = (torch.randn(4, 3), torch.randn(8, 3))
    rows = Dim("rows", min=2, max=64)
    free = exported(Sized(), *args, dynamic_shapes={"x": {0: rows}, "y": {0: 2 * rows}})

    def fixed(x: Tensor, y: Tensor) -> Any:
        return free(x, y) if x.shape[0] == 4 else free(x, y) + 1

    assert verify(free, Sized(), args).notes == ()
    assert verify(free, Sized(), args).calls == 4
    comparison = compare(free, fixed, args)
    assert [difference.when.split(" = ")[1] for difference in comparison.differences] == ["5"]
    assert compare(free, fixed, args, other_shapes=False).equal


def test_sizes_that_the_original_refuses_are_noted() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    free = exported(Square(), torch.randn(4), dynamic_shapes={"x": {0: Dim("size", min=4, max=4096)}})
    real = free.forward

    def strict(x: Tensor) -> Any:
        if x.shape[0] != 4:
            raise ValueError("four, please")
        return real(x)

    free.forward = strict
    comparison = verify(free, free, (torch.randn(4),))
    assert "accepts no other sizes" in comparison.notes[0]


def test_differences_name_the_node_that_gives_an_output() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.relu(), x.cos()

    traced = symbolic_trace(Two())
    comparison = compare(traced, lambda x: (x.relu(), x.sin()), (torch.ones(3),))
    assert [difference.where for difference in comparison.differences] == ["output[1] (node 'cos')"]
