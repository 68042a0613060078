"""Storage classes: which values of a graph may live in one storage, as far as anyone can tell before it runs."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Protocol, final

from torch import Tensor, nn
from torch.fx import Graph, Node

from partita._torch.schemas import storage_key
from partita.graphs.attributes import find, modules_in
from partita.graphs.behaviour_terms import Behaviour, nodes_in_slots
from partita.graphs.index import Index
from partita.graphs.values import tensors_in, value_of

__all__ = ["NodeBehaviours", "Storages", "storages_of", "tensors_of", "written_classes"]


class NodeBehaviours(Protocol):
    """What we need to know about the nodes of one graph."""

    root: nn.Module

    def aliasing(self, graph: Graph) -> dict[Node, Behaviour]: ...

    def bodies(self, node: Node) -> Iterator[nn.Module]: ...


@final
class Storages:
    """Nodes by number, and tensors of the module by storage, joined into classes that may share memory.

    Number `world` stands for all that an unknown function may reach. Tensors get numbers above it as they turn up;
    once an unknown function is seen, they all belong to the world.
    """

    def __init__(self, count: int, *, is_open: bool) -> None:
        self.world = count
        self.is_open = is_open
        self._parent = list(range(count + 1))
        self._number_by_key: dict[int, int] = {}
        self._tensors: dict[int, Tensor] = {}

    def find(self, i: int) -> int:
        """The number that stands for the class of `i`."""
        parent = self._parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(self, i: int, j: int) -> None:
        """From now on `i` and `j` may share memory; the smaller number stands for both."""
        i, j = self.find(i), self.find(j)
        if i != j:
            self._parent[max(i, j)] = min(i, j)

    def number_of(self, tensor: Tensor) -> int:
        """The number of a tensor of the module."""
        key = storage_key(tensor)
        number = self._number_by_key.get(key)
        if number is None:
            number = self._number_by_key[key] = len(self._parent)
            self._parent.append(number)
            self._tensors[number] = tensor
            if self.is_open:
                self.join(number, self.world)
        return number

    def known_number_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor of the module, or None if nothing in the graph has met its storage."""
        return self._number_by_key.get(storage_key(tensor))

    def tensors_in(self, classes: Container[int]) -> Iterator[Tensor]:
        """The tensors of the module that are in one of `classes`."""
        return (tensor for number, tensor in self._tensors.items() if self.find(number) in classes)

    def roots(self) -> list[int]:
        """The number that stands for the class of each node."""
        find, parent = self.find, self._parent
        return [i if parent[i] == i else find(i) for i in range(self.world)]


def storages_of(index: Index, behaviours: NodeBehaviours, acting: Mapping[Node, Behaviour]) -> Storages:
    """The storage classes of a graph: from schemas, from the tensors of the module, and from traced values.

    A traced value may only join classes, since some tracers give each value a storage of its own.
    """
    storages = Storages(len(index), is_open=any(told.unknown for told in acting.values()))
    _join_results(index, storages, behaviours)
    _join_attributes(index, storages, behaviours.root)
    _join_traced_values(index, storages)
    return storages


def written_classes(index: Index, storages: Storages, acting: Mapping[Node, Behaviour]) -> dict[int, set[int]]:
    """The classes that each writing node may write, by its number."""
    find, number = storages.find, index.number
    written: dict[int, set[int]] = {}
    for node, told in acting.items():
        if told.writes or told.state_writes:
            classes = {find(number[given]) for given in nodes_in_slots(node, told.writes)}
            classes.update(find(storages.number_of(tensor)) for tensor in told.state_writes)
            written[number[node]] = classes | {find(storages.world)} if told.unknown else classes
    return written


def _join_results(index: Index, storages: Storages, behaviours: NodeBehaviours) -> None:
    number, join = index.number, storages.join
    for node, told in behaviours.aliasing(index.graph).items():
        i = number[node]
        for given in nodes_in_slots(node, told.aliases):
            join(i, number[given])
        if told.unknown:
            join(i, storages.world)
        elif told.shares_state:
            for body in behaviours.bodies(node):
                for tensor in tensors_of(body):
                    join(i, storages.number_of(tensor))


def _join_attributes(index: Index, storages: Storages, root: nn.Module) -> None:
    for i, node in enumerate(index.nodes):
        if node.op == "get_attr":
            value = find(root, str(node.target))
            if isinstance(value, Tensor):
                storages.join(i, storages.number_of(value))


def _join_traced_values(index: Index, storages: Storages) -> None:
    first: dict[int, int] = {}
    for i, node in enumerate(index.nodes):
        if node.meta:
            for tensor in tensors_in(value_of(node)):
                storages.join(i, first.setdefault(storage_key(tensor), i))


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """The parameters, buffers and other tensors that `module` and its children hold."""
    parts = list(modules_in(module))
    for tables in ([part._parameters for part in parts], [part._buffers for part in parts], map(vars, parts)):
        yield from (value for table in tables for value in table.values() if isinstance(value, Tensor))
