"""Random inputs fit the program that they are made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx import Graph, symbolic_trace
from torch.utils._pytree import TreeSpec, treespec_leaf

import partita
from partita.equivalence.random_inputs import _rows, random_inputs
from partita.errors import OptionError


class Several(nn.Module):
    """Takes nested containers, keywords, indices, truth values and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Embedding(3, 4), nn.Embedding(50, 4)

    def forward(
        self, ids: torch.Tensor, pair: dict[str, torch.Tensor], scale: float, *, mask: torch.Tensor
    ) -> torch.Tensor:
        found = self.small(ids.view(-1)) + self.large(ids.view(-1)) * scale
        return torch.where(mask, found, pair["x"] + pair["y"].to(torch.float32))


def _program() -> partita.Program:
    args: tuple[Any, ...] = (
        torch.zeros(2, 3, dtype=torch.long),
        {"x": torch.randn(6, 4), "y": torch.ones(6, 4, dtype=torch.bfloat16)},
        0.5,
    )
    return partita.capture(Several(), args, {"mask": torch.ones(6, 4, dtype=torch.bool)})


def test_inputs_have_the_sizes_dtypes_and_containers_of_the_trace() -> None:
    program = _program()
    (ids, pair, scale), keywords = random_inputs(program, seed=1)
    assert (ids.shape, ids.dtype, scale) == ((2, 3), torch.long, 0.5)
    assert set(pair) == {"x", "y"}
    assert pair["y"].dtype is torch.bfloat16
    assert keywords["mask"].dtype is torch.bool
    assert 0 <= int(ids.min()) <= int(ids.max()) < 3  # The smaller table has three rows.
    assert program.module()(ids, pair, scale, **keywords).shape == (6, 4)


def test_a_seed_decides_and_other_generators_stay_as_they_are() -> None:
    program, state = _program(), torch.get_rng_state()
    one, same, other = (random_inputs(program, seed=seed)[0][1]["x"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_dynamic_sizes_are_as_they_were_traced() -> None:
    program = partita.capture(nn.Linear(4, 4), (torch.randn(5, 4),), dynamic_shapes=({0: Dim("batch")},))
    (x,), _ = random_inputs(program)
    assert x.shape == (5, 4)


def test_a_graph_module_says_nothing_about_its_inputs() -> None:
    with pytest.raises(OptionError, match="only an exported program"):
        random_inputs(partita.Program.of(symbolic_trace(nn.ReLU())))


class _First(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def _claimed(x: torch.Tensor) -> partita.Program:
    """A program whose input is traced as `x`, which need not be there."""
    program = partita.capture(_First(), (torch.ones(2),))
    (node,) = program.graph.find_nodes(op="placeholder")
    node.meta["val"] = x
    return program


def test_inputs_that_would_take_all_memory_are_not_made() -> None:
    with pytest.raises(OptionError, match=r"the inputs have 8,000,000,000 bytes, .* pass inputs instead"):
        random_inputs(_claimed(torch.empty(2_000_000_000, device="meta")))


def test_inputs_on_a_device_that_is_not_here_are_refused_in_words() -> None:
    with FakeTensorMode(), pytest.raises(OptionError, match=r"no tensor here for input 'x', .* on vulkan"):
        random_inputs(_claimed(torch.empty(2, device="vulkan")))


def test_inputs_that_do_not_fit_their_containers_are_refused_in_words() -> None:
    program = partita.capture(_First(), (torch.ones(2),))
    assert program.export is not None
    (call,) = (one for one in program.export.module_calls if not one.fqn)
    pair = TreeSpec(torch.return_types.max, None, [treespec_leaf()])  # It has two items.
    args = TreeSpec(tuple, None, [pair])
    call.signature.in_spec = TreeSpec(tuple, None, [args, TreeSpec(dict, [], [])])
    with pytest.raises(OptionError, match="cannot be put into their containers"):
        random_inputs(program)


def test_a_table_without_rows_says_nothing_of_its_indices() -> None:
    graph = Graph()
    table, ids = graph.placeholder("table"), graph.placeholder("ids")
    graph.output(graph.call_function(torch.ops.aten.embedding.default, (table, ids)))
    table.meta["val"], ids.meta["val"] = torch.tensor(1.0), torch.zeros(3, dtype=torch.long)
    assert _rows(ids) == 2
