"""Joint graphs: which nodes are forward and which backward, by their dependences, and what is saved in between."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.fx import GraphModule, Node

from partita._plain_help import PlainHelp
from partita._torch.operator_schemas import storage_key, viewed_node
from partita.analysis.index import Index
from partita.analysis.nodes import bytes_of_value, find, known_sum, tensors_in, value_of
from partita.errors import OptionError, SignatureError, listed

__all__ = ["Joint", "SavedStorage"]


@final
@dataclass(frozen=True, slots=True)
class SavedStorage(metaclass=PlainHelp):
    """One storage that the forward saves for backward."""

    #: The values on this storage that the backward reads, in graph order; all but one are views.
    nodes: tuple[Node, ...]
    #: The bytes of the whole storage, of which a value may be a part; None if unknown.
    bytes: int | None
    #: Whether it belongs to an input (a parameter, a buffer, an argument) or a constant, and is alive anyway.
    is_input: bool

    @property
    def node(self) -> Node:
        """The first of the nodes."""
        return self.nodes[0]


@final
@dataclass(frozen=True, slots=True)
class Joint(metaclass=PlainHelp):
    """The inputs and outputs of a joint graph, its two halves, and what the forward saves for backward.

    A node is backward if it depends on a tangent, or if its tracer tagged it so and no output of the forward needs it.
    Nodes are in graph order; inputs and the output node are in neither half.
    """

    #: The inputs of the forward: parameters, buffers and arguments (AOTAutograd's primals).
    inputs: tuple[Node, ...]
    #: The inputs of the backward: gradients of outputs of the forward.
    tangents: tuple[Node, ...]
    #: The outputs of the forward: first new values of the mutated inputs in `mutated`, then results, or constants.
    forward_outputs: tuple[Any, ...]
    #: The outputs of the backward: the gradient of each input, or None. (Other tracers may omit the Nones.)
    gradients: tuple[Any, ...]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    #: What the backward reads of the forward and its inputs if nothing is recomputed; one entry for each storage.
    saved: tuple[SavedStorage, ...]
    #: Names of the parameters and buffers, which come first among the inputs, if the tracer recorded them.
    state: tuple[str, ...]
    #: The inputs that the model mutates, if the tracer recorded them.
    mutated: tuple[Node, ...]

    @property
    def saved_bytes(self) -> int | None:
        """The bytes saved for backward beside the inputs, which are alive anyway; None if a size is unknown."""
        return known_sum(entry.bytes for entry in self.saved if not entry.is_input)

    @property
    def saved_input_bytes(self) -> int | None:
        """The bytes of the inputs that the backward reads; None if a size is unknown."""
        return known_sum(entry.bytes for entry in self.saved if entry.is_input)


def joint_of(index: Index, root: GraphModule, forward_outputs: int) -> Joint:
    """The joint graph whose first `forward_outputs` outputs are those of the forward; raises if the graph is none."""
    outputs = _returned(index.nodes[-1])
    _check_outputs(outputs, forward_outputs)
    placeholders = [node for node in index.nodes if node.op == "placeholder"]
    tangents = tuple(filter(_is_tangent, placeholders))
    results, gradients = outputs[:forward_outputs], outputs[forward_outputs:]
    backward = _backward(index, results)
    if not tangents and any(isinstance(node, Node) and not backward[index.number[node]] for node in gradients):
        raise SignatureError(
            f"none of the inputs {listed([node.name for node in placeholders], 4)} is a tangent: in a joint graph the "
            "inputs of the backward are called 'tangents_1' and so on, as AOTAutograd does; trace one with "
            "partita.capture_joint(model, args)"
        )
    inputs = tuple(node for node in placeholders if not _is_tangent(node))
    forward_part, backward_part = (
        tuple(
            node
            for number, node in enumerate(index.nodes)
            if backward[number] is part and node.op not in ("placeholder", "get_attr", "output")
        )
        for part in (False, True)
    )
    return Joint(
        inputs=inputs,
        tangents=tangents,
        forward_outputs=results,
        gradients=gradients,
        forward=forward_part,
        backward=backward_part,
        saved=_saved(index, root, backward, gradients),
        state=tuple(name for node in inputs if (name := _state_name(node)) is not None),
        mutated=_mutated(index.nodes[-1], inputs),
    )


def checked_count(forward_outputs: object) -> int:
    """`forward_outputs`, if it is a positive integer."""
    if type(forward_outputs) is not int or forward_outputs < 1:
        raise OptionError(
            f"forward_outputs is the number of outputs of the forward, at least 1, not {forward_outputs!r}; "
            "AOTAutograd calls it num_fwd_outputs"
        )
    return forward_outputs


def _returned(output: Node) -> tuple[Any, ...]:
    return _flat(output.args[0] if output.args else ())


def _flat(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple | list):
        return tuple(leaf for item in value for leaf in _flat(item))
    return (value,)


def _check_outputs(outputs: Sequence[Any], forward_outputs: int) -> None:
    if forward_outputs > len(outputs):
        raise SignatureError(
            f"the graph has {len(outputs)} outputs, so its forward cannot have {forward_outputs}; pass the number of "
            "outputs before the first gradient"
        )
    if forward_outputs == len(outputs):
        raise SignatureError(
            f"all {forward_outputs} outputs of the graph would be those of its forward, and none a gradient; pass the "
            "number of outputs before the first gradient"
        )


def _is_tangent(node: Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def _backward(index: Index, forward_outputs: Sequence[Any]) -> list[bool]:
    """Whether each node belongs to the backward."""
    needed = _needed(index, forward_outputs)
    backward = _reached(index, _is_tangent)
    for number in range(len(index) - 1):
        if needed[number] and backward[number]:
            raise _mixed(index, forward_outputs)
    tagged = _reached(index, lambda node: _is_tangent(node) or node.meta.get("partitioner_tag") in _BACKWARD_TAGS)
    tagged[-1] = False  # The output node reads both halves.
    return [late and not early for late, early in zip(tagged, needed, strict=True)]


#: How AOTAutograd tags nodes that it traced in the backward.
_BACKWARD_TAGS = ("is_backward", "must_be_in_backward")


def _needed(index: Index, forward_outputs: Sequence[Any]) -> list[bool]:
    """Whether an output of the forward depends on each node."""
    needed = [False] * len(index)
    for value in forward_outputs:
        if isinstance(value, Node):
            needed[index.number[value]] = True
    for number in range(len(index) - 1, -1, -1):
        if needed[number]:
            for source in index.inputs(number):
                needed[source] = True
    return needed


def _reached(index: Index, starts: Callable[[Node], bool]) -> list[bool]:
    """Whether each node is a start or depends on one; an item of a container follows the container."""
    reached = [False] * len(index)
    for number, node in enumerate(index.nodes):
        depends = any(map(reached.__getitem__, index.inputs(number)))
        reached[number] = depends or (node.target is not operator.getitem and starts(node))
    return reached


def _mixed(index: Index, forward_outputs: Sequence[Any]) -> SignatureError:
    """The error for an output of the forward that depends on a tangent."""
    for value in forward_outputs:
        above = _needed(index, (value,))
        named = [node for node, needed in zip(index.nodes, above, strict=True) if needed and _is_tangent(node)]
        if named:
            return SignatureError(
                f"output {value.name!r} of the forward depends on the tangent {named[0].name!r}; forward_outputs "
                "counts the outputs before the first gradient, and no region may hold nodes of both halves"
            )
    raise AssertionError("an output depends on a tangent but none was found")


def _state_name(node: Node) -> str | None:
    """The parameter or buffer that AOTAutograd recorded for an input."""
    name = getattr(node.meta.get("desc"), "target", None)
    return name if isinstance(name, str) else None


def _mutated(output: Node, inputs: Sequence[Node]) -> tuple[Node, ...]:
    """The inputs whose new values AOTAutograd recorded as outputs."""
    recorded = [getattr(entry, "mutated_input", None) for entry in output.meta.get("desc") or ()]
    known: dict[Any, list[Node]] = {}
    for node in inputs:
        known.setdefault(node.meta.get("desc"), []).append(node)
    return tuple(node for entry in recorded if entry is not None for node in known.get(entry, ()))


# Saved values: what the backward reads of the forward, in bytes; every storage counts once.


def _saved(
    index: Index, root: GraphModule, backward: Sequence[bool], gradients: Sequence[Any]
) -> tuple[SavedStorage, ...]:
    """What the backward reads of other nodes, in graph order, and what is returned unchanged as a gradient."""
    returned = {index.number[value] for value in gradients if isinstance(value, Node)}
    read = {source for source, target in index.edges() if backward[target]} | returned
    storages = _Storages(index, root)
    found: dict[int, list[Node]] = {}
    for number in sorted(number for number in read if not backward[number]):
        for storage in storages.of(number):
            found.setdefault(storage, []).append(index.nodes[number])
    return tuple(
        SavedStorage(tuple(nodes), storages.bytes[storage], storage in storages.inputs)
        for storage, nodes in found.items()
    )


class _Storages:
    """The storages of a graph by number, from traced values, and from schemas where views were traced apart."""

    def __init__(self, index: Index, root: GraphModule) -> None:
        self.index, self.root = index, root
        self.bytes: list[int | None] = []
        #: Storages of inputs and constants.
        self.inputs: set[int] = set()
        self._by_key: dict[int, int] = {}
        self._of: dict[int, tuple[int, ...]] = {}
        for number, node in enumerate(index.nodes):
            self._of[number] = self._found(node)
            if node.op in ("placeholder", "get_attr"):
                self.inputs.update(self._of[number])

    def of(self, number: int) -> tuple[int, ...]:
        """The storages of a node's value: several for a container, none for a number."""
        return self._of[number]

    def _found(self, node: Node) -> tuple[int, ...]:
        if node.op == "output":
            return ()
        viewed = _viewed(node)
        if viewed is not None:
            storages = self._of[self.index.number[viewed]]
            if len(storages) == 1:
                # A view that was traced with its own storage may show that its base is larger.
                for tensor in tensors_in(self._value(node)):
                    self._by_key.setdefault(storage_key(tensor), storages[0])
                    known, size = self.bytes[storages[0]], _storage_bytes(tensor)
                    self.bytes[storages[0]] = None if known is None or size is None else max(known, size)
                return storages
        value = self._value(node)
        if value is None:
            return (self._new(None),)
        return tuple(dict.fromkeys(map(self._numbered, tensors_in(value))))

    def _value(self, node: Node) -> Any:
        value = value_of(node)
        if value is None and node.op == "get_attr":
            return find(self.root, str(node.target))
        return value

    def _numbered(self, tensor: Tensor) -> int:
        key = storage_key(tensor)
        number = self._by_key.get(key)
        if number is None:
            number = self._by_key[key] = self._new(_storage_bytes(tensor))
        return number

    def _new(self, size: int | None) -> int:
        self.bytes.append(size)
        return len(self.bytes) - 1


def _viewed(node: Node) -> Node | None:
    """The node that a node returns a view of; an item of a container is a view only if the container holds views."""
    viewed = viewed_node(node)
    if viewed is not None and node.target is operator.getitem:
        return _viewed(viewed)
    return viewed


def _storage_bytes(tensor: Tensor) -> int | None:
    """The bytes of the storage of a traced tensor; None if its size is symbolic."""
    try:
        size: Any = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # Sparse and opaque tensors have no storage of their own.
        return bytes_of_value(tensor)
    return size if isinstance(size, int) else None
