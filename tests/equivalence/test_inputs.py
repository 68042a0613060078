"""Arguments of other sizes than the caller's."""

from __future__ import annotations

from typing import Any

import torch
from tests.helpers.work import calls_during
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import partita
from partita.equivalence.inputs import arguments_of, resized


def _dynamic(count: int) -> tuple[list[Tensor], list[Any]]:
    """So many tensors, and placeholders for them that were traced with a symbol each."""
    env, made = ShapeEnv(), Graph()
    tensors, nodes = [torch.ones(6) for _ in range(count)], list[Any]()
    for at in range(count):
        node = made.placeholder(f"x{at}")
        source = torch._dynamo.source.ConstantSource(f"x{at}")
        symbol = env.create_symbol(6, source, DimDynamic.DYNAMIC, constraint_dim=None)
        size = env.create_symintnode(symbol, hint=6, source=source)
        node.meta["val"] = torch.empty(size, device="meta")
        nodes.append(node)
    return tensors, nodes


def test_inputs_with_a_symbol_each_are_resized_in_proportion() -> None:
    def work(count: int) -> int:
        tensors, nodes = _dynamic(count)
        found = list[Any]()
        calls = calls_during(lambda: found.extend(resized(arguments_of(tensors, {}), nodes)))
        assert all(len(set(map(len, others.tree.leaves))) == 1 for _, others in found)
        assert found
        return calls

    work(10)
    few, more, many = work(10), work(20), work(80)
    assert many - more < 8 * (more - few)


def test_an_empty_input_with_a_dynamic_size_is_compared_as_it_is() -> None:
    program = partita.capture(nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: Dim("rows", min=0, max=64)},))
    comparison = partita.compare(program, program, (torch.ones(0, 2),))
    assert comparison.equal
    assert "other sizes were not tried" in comparison.notes[0]
