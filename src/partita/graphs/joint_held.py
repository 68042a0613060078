"""Held values: what a backward reads of its forward, in bytes, with every storage counted once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.schemas import storage_key, viewed_node
from partita.graphs.attributes import find
from partita.graphs.index import Index
from partita.graphs.joint import Held
from partita.graphs.values import bytes_of_value, tensors_in, value_of

__all__ = ["held_by"]


def held_by(index: Index, root: GraphModule, backward: Sequence[bool], gradients: Sequence[Any]) -> tuple[Held, ...]:
    """What nodes of the backward read of the others, in graph order; also what is returned as a gradient as it is."""
    returned = {index.number[value] for value in gradients if isinstance(value, Node)}
    read = {source for source, target in index.edges() if backward[target]} | returned
    storages = _Storages(index, root)
    found: dict[int, list[Node]] = {}
    for number in sorted(number for number in read if not backward[number]):
        for storage in storages.of(number):
            found.setdefault(storage, []).append(index.nodes[number])
    return tuple(
        Held(tuple(nodes), storages.bytes[storage], storage in storages.inputs) for storage, nodes in found.items()
    )


class _Storages:
    """The storages of a graph by number, from traced values, and from schemas where a tracer gave views their own."""

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
                # A view of a base that was traced with a storage of its own may show that the base is larger.
                for tensor in tensors_in(self._value(node)):
                    self._grow(storages[0], tensor)
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

    def _grow(self, storage: int, tensor: Tensor) -> None:
        self._by_key.setdefault(storage_key(tensor), storage)
        known, size = self.bytes[storage], _storage_bytes(tensor)
        self.bytes[storage] = None if known is None or size is None else max(known, size)


def _viewed(node: Node) -> Node | None:
    """What a node gives a view of; an item of a container is one only if the container holds views."""
    viewed = viewed_node(node)
    if viewed is not None and node.target is operator.getitem:
        return _viewed(viewed)
    return viewed


def _storage_bytes(tensor: Tensor) -> int | None:
    """The bytes of the storage that a traced tensor lives in; None where its size is symbolic."""
    try:
        size: Any = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # Sparse and opaque tensors have no storage of their own.
        return bytes_of_value(tensor)
    return size if isinstance(size, int) else None
