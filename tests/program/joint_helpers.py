"""Models whose joint graphs are plain to see, and eager's answer beside that of a joint graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import partita
from partita import Program


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(x)).sigmoid()))


class Stack(nn.Module):
    """Blocks in a row, and a loss."""

    def __init__(self, depth: int = 4, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@dataclass(frozen=True)
class Step:
    """What one forward and backward came to: results, new values of state by name, gradients by name or place."""

    results: list[Any]
    state: dict[str, Tensor]
    gradients: dict[str | int, Tensor | None]


def eager_step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> Step:
    """The step on a copy of the model, with random tangents from `seed + 1`."""
    model = copy.deepcopy(model)
    args, named = tree_map_only(Tensor, _own, (args, dict(kwargs)))
    torch.manual_seed(seed)
    results = tree_leaves(model(*args, **named))
    differentiable = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
    torch.autograd.backward(differentiable, tangents_for(differentiable, seed))
    gradients: dict[str | int, Tensor | None] = {name: value.grad for name, value in model.named_parameters()}
    for place, leaf in enumerate(tree_leaves((args, named))):
        gradients[place] = leaf.grad if isinstance(leaf, Tensor) else None
    return Step(results, {name: value.detach() for name, value in model.named_buffers()}, gradients)


def joint_step(program: Program, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> Step:
    """The same step by a joint graph that was captured from the model."""
    joint = program.joint
    assert joint is not None
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves((args, kwargs))]
    primals = [*(held[name].detach().clone() for name in joint.state), *leaves]
    assert len(primals) == len(joint.inputs) == len(joint.gradients)
    tangents = tangents_for([node.meta["val"] for node in joint.tangents], seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        given = program.module()(*primals, *tangents)
    count = len(joint.forward_outputs)
    names: list[str | int] = [*joint.state, *range(len(leaves))]
    name_of = dict(zip(joint.inputs, names, strict=True))
    buffers = dict(model.named_buffers())
    written = {name_of[node]: value for node, value in zip(joint.mutated, given, strict=False)}
    state = {name: written.get(name, value) for name, value in buffers.items()}
    gradients = {name: value for name, value in zip(names, given[count:], strict=True) if name not in buffers}
    return Step(list(given[len(joint.mutated) : count]), state, gradients)


def tangents_for(values: list[Tensor], seed: int) -> list[Tensor]:
    torch.manual_seed(seed + 1)
    return [torch.randn(value.shape, dtype=torch.float32).to(value.dtype) for value in values]


def check_joint(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, seed: int = 3
) -> Program:
    """The captured joint graph, which gives the bits that eager gives: results, new state and every gradient."""
    program = partita.capture_joint(model, args, kwargs)
    expected = eager_step(model, args, kwargs or {}, seed)
    assert_same_step(joint_step(program, model, args, kwargs or {}, seed), expected)
    return program


def assert_same_step(found: Step, expected: Step) -> None:
    assert len(found.results) == len(expected.results)
    for ours, theirs in zip(found.results, expected.results, strict=True):
        assert _same(ours, theirs)
    assert found.state.keys() >= expected.state.keys()
    assert [name for name, value in expected.state.items() if not _same(found.state[name], value)] == []
    assert found.gradients.keys() == expected.gradients.keys()
    assert [name for name, value in expected.gradients.items() if not _same(found.gradients[name], value)] == []


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return type(ours) is type(theirs) and ours == theirs
