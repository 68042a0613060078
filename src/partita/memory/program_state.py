"""The parameters, buffers, arguments and results of an exported program, and the bytes that they take throughout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from partita._torch.operator_schemas import storage_key
from partita._torch.symbolic_shapes import hint_of
from partita.analysis.nodes import value_of
from partita.program.program import Program


def user_outputs(program: Program, output: Node) -> list[Node]:
    """The results of the program, without new values of mutated state."""
    returned = list(output.args[0]) if isinstance(output.args[0], tuple | list) else [output.args[0]]
    if program.export is None:
        return [node for node in returned if isinstance(node, Node)]
    specs = program.export.signature.output_specs
    return [
        node
        for node, spec in zip(returned, specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT and isinstance(node, Node)
    ]


def states_of(program: Program) -> dict[str, Any]:
    """The parameters, buffers and constants of an exported program by the names of its inputs."""
    if program.export is None:
        return {}
    held = {**program.export.constants, **program.export.state}
    specs = program.export.signature.input_specs
    inputs = program.graph.find_nodes(op="placeholder")
    return {
        node.name: held[str(spec.target)]
        for node, spec in zip(inputs, specs, strict=True)
        if spec.kind in _STATE_KINDS and str(spec.target) in held
    }


_STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def state_identity(node: Node, program: Program) -> int:
    value = program.once(states_of).get(node.name)
    return storage_key(value) if isinstance(value, Tensor) else id(node)


def resident_bytes(program: Program, *, rounding: int = 1) -> int:
    """The bytes of all parameters, buffers, constants and arguments; every storage counts once."""
    states = program.once(states_of)
    traced = (states.get(node.name, value_of(node)) for node in program.graph.find_nodes(op="placeholder"))
    tensors = [value for value in traced if isinstance(value, Tensor)]
    tensors += [value for value in _attributes(program.graph_module) if isinstance(value, Tensor)]
    sizes: dict[int, int] = {}
    for tensor in tensors:
        # Of an argument that is a view, the trace has a symbol for the size of the base; `int` would guard on it.
        size = int(hint_of(tensor.untyped_storage().nbytes()))
        sizes[storage_key(tensor)] = -(-size // rounding) * rounding
    return sum(sizes.values())


def _attributes(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
