"""Parameters and buffers that a backend compiles into its functions, and the check that they are still the same."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.optim.optimizer import register_optimizer_step_post_hook

from partita._torch.tensors import version_of
from partita.analysis.nodes import attribute_of, is_module_state
from partita.program.program import Program
from partita.regions import Region
from partita.rewrite.operator_calls import owned_inputs

#: Buffers of at most so many elements are compared by value at every call: a batch norm updates its statistics without
#: raising the version counter.
_SMALL = 1 << 14


def state_inputs(body: GraphModule, region: Region) -> tuple[int, ...]:
    """The inputs of a region's body that are parameters, buffers or constants which the program does not mutate."""
    program = region.surroundings()
    owned = owned_inputs(program)
    state = {node.name for node in region.inputs() if node in owned or is_state(node, program)}
    state -= program.mutations.names_mutated(node for node in region.inputs() if node.name in state)
    if program.export is not None:  # A functional program returns the new values of its buffers.
        signature = program.export.signature
        updated = signature.buffers_to_mutate.values()
        state -= {name for name, path in signature.inputs_to_buffers.items() if path in updated}
    inputs = body.graph.find_nodes(op="placeholder")
    return tuple(place for place, node in enumerate(inputs) if node.name in state)


def is_state(node: Node, program: Program) -> bool:
    """Whether a node reads a tensor that a module holds."""
    if node.op == "get_attr":
        return isinstance(attribute_of(program.graph_module, node), Tensor)
    return node.op == "placeholder" and is_module_state(node)


def can_be_constant(value: Any) -> bool:
    """Whether a change of a value would be noticed: no inference tensor has a version counter."""
    return type(value) in (Tensor, nn.Parameter) and not value.is_inference()


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
    def of(cls, places: Collection[int], values: Sequence[Any]) -> Constants:
        """Those at `places`."""
        return cls(tuple(places), tuple(_Held(values[place]) for place in places))

    def are_in(self, values: Sequence[Any]) -> bool:
        """Whether these values have the same tensors in the same places, unchanged."""
        tensors = [values[place] for place in self.places]
        if self._held is None:
            self._held = tuple(map(_Held, tensors)) if _digest_of(tensors) == self._digest else ()
        pairs = zip(tensors, self._held, strict=False)
        return len(self._held) == len(tensors) and all(held.is_(tensor) for tensor, held in pairs)

    def is_current(self) -> bool:
        """Whether no tensor was changed or freed, so that a call may have them again."""
        return self._held is None or all(held.is_(held.tensor) for held in self._held)

    def others(self, values: Sequence[Any]) -> list[Any]:
        """The values that are no constants, which the function takes."""
        places = set(self.places)
        return [value for place, value in enumerate(values) if place not in places]

    def __reduce__(self) -> tuple[Any, ...]:
        digest = self._digest if self._held is None else _digest_of(held.tensor for held in self._held)
        return Constants, (self.places, None, digest)


@final
class _Held:
    """A tensor, and what shows that it is unchanged: version counter, memory, optimizer steps, or the values."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.is_stepped = False
        self._memory, self._version = tensor.data_ptr(), version_of(tensor)
        is_small = not isinstance(tensor, nn.Parameter) and tensor.numel() <= _SMALL
        self._values = tensor.detach().clone() if is_small else None
        _STEPS.watch(self)

    def is_(self, tensor: Tensor) -> bool:
        """Whether this is the tensor, unchanged."""
        is_same = tensor is self.tensor and tensor.data_ptr() == self._memory and not self.is_stepped
        if not is_same or version_of(tensor) != self._version:
            return False
        return self._values is None or torch.equal(tensor, self._values)


@final
class _OptimizerSteps:
    """Marks held tensors that an optimizer has changed: fused kernels do not raise their version counters."""

    def __init__(self) -> None:
        self._watched: dict[int, WeakSet[_Held]] = {}
        self._is_registered = False

    def watch(self, held: _Held) -> None:
        if not self._is_registered:
            self._is_registered = True
            register_optimizer_step_post_hook(self._mark)
        self._watched.setdefault(id(held.tensor), WeakSet()).add(held)

    def _mark(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            for held in self._watched.pop(id(parameter), ()):
                held.is_stepped = True


_STEPS = _OptimizerSteps()


def _digest_of(tensors: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(repr((flat.dtype, tuple(tensor.shape))).encode())
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()
