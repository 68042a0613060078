"""Owned inputs: the inputs of an exported program that stand for its parameters, buffers and constants."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from partita.graphs.program import Program

__all__ = ["owned_inputs"]


def owned_inputs(program: Program) -> dict[Node, Tensor]:
    """The tensor that each of these inputs stands for; none for a program made from a graph module."""
    if program.export is None:
        return {}
    held = {**program.export.constants, **program.export.state}
    specs = {spec.arg.name: spec.target for spec in program.export.signature.input_specs if spec.target is not None}
    inputs = program.graph.find_nodes(op="placeholder")
    owned = ((node, held.get(specs.get(node.name, ""))) for node in inputs)
    return {node: tensor for node, tensor in owned if isinstance(tensor, Tensor)}
