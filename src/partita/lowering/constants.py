"""Parameters and buffers that a backend compiles into its functions, and the check that they are still the same."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final
from weakref import ref

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from partita.analysis.nodes import attribute_of, is_module_state
from partita.program.program import Program
from partita.regions import Region
from partita.rewrite.operator_calls import owned_inputs

#: A tensor, the version of its values, and where they are.
_Held: TypeAlias = tuple[ref[Tensor], int, int]


def state_inputs(body: GraphModule, region: Region) -> tuple[int, ...]:
    """The inputs of a region's body that are parameters, buffers or constants which the program does not mutate."""
    program = region.surroundings()
    owned = owned_inputs(program)
    state = {node.name for node in region.inputs() if node in owned or _is_state(node, program)}
    state -= program.mutations.names_mutated(node for node in region.inputs() if node.name in state)
    if program.export is not None:  # A functional program returns the new values of its buffers.
        signature = program.export.signature
        updated = signature.buffers_to_mutate.values()
        state -= {name for name, path in signature.inputs_to_buffers.items() if path in updated}
    inputs = body.graph.find_nodes(op="placeholder")
    return tuple(place for place, node in enumerate(inputs) if node.name in state)


def _is_state(node: Node, program: Program) -> bool:
    if node.op == "get_attr":
        return isinstance(attribute_of(program.graph_module, node), Tensor)
    return node.op == "placeholder" and is_module_state(node)


def holding(body: GraphModule, constants: Mapping[int, Tensor]) -> GraphModule:
    """The body with these inputs as buffers of its own, without gradients."""
    inputs = body.graph.find_nodes(op="placeholder")
    for place, tensor in constants.items():
        node = inputs[place]
        body.register_buffer(node.name, tensor.detach())
        with body.graph.inserting_before(node):
            node.replace_all_uses_with(body.graph.get_attr(node.name))
        body.graph.erase_node(node)
    body.recompile()
    return body


@final
@dataclass(slots=True, eq=False)
class Constants:
    """The tensors that a function was compiled with, by their places among its inputs.

    After a load nothing is held: the first call shows the tensors, which are compared by a digest of their values.
    """

    places: tuple[int, ...]
    _held: tuple[_Held, ...] | None
    _digest: str | None = None

    @classmethod
    def of(cls, places: Collection[int], values: Sequence[Any]) -> Constants | None:
        """Those at `places`; None if there are none."""
        return cls(tuple(places), _held(values[place] for place in places)) if places else None

    def are_in(self, values: Sequence[Any]) -> bool:
        """Whether these values have the same tensors in the same places, unchanged."""
        tensors = [values[place] for place in self.places]
        if self._held is None:
            self._held = _held(tensors) if _digest_of(tensors) == self._digest else ()
        pairs = zip(tensors, self._held, strict=False)
        return len(self._held) == len(tensors) and all(_is(tensor, held) for tensor, held in pairs)

    def is_current(self) -> bool:
        """Whether no tensor was changed or freed, so that a call may have them again."""
        return self._held is None or all(_is(held[0](), held) for held in self._held)

    def others(self, values: Sequence[Any]) -> list[Any]:
        """The values that are no constants, which the function takes."""
        places = set(self.places)
        return [value for place, value in enumerate(values) if place not in places]

    def __reduce__(self) -> tuple[Any, ...]:
        tensors = [held[0]() for held in self._held or ()]
        digest = self._digest if self._held is None or None in tensors else _digest_of(tensors)
        return Constants, (self.places, None, digest)


def _held(tensors: Iterable[Tensor]) -> tuple[_Held, ...]:
    return tuple((ref(tensor), _version(tensor), tensor.data_ptr()) for tensor in tensors)


def _is(tensor: Tensor | None, held: _Held) -> bool:
    known, version, memory = held
    return tensor is not None and tensor is known() and _version(tensor) == version and tensor.data_ptr() == memory


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _digest_of(tensors: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(repr((flat.dtype, tuple(tensor.shape))).encode())
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()
