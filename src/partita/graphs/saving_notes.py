"""Notes of a run: which storages there are, who made them, and which of them autograd holds in the end."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.fx import Node

from partita._torch.stage import tensors_in
from partita._torch.symbolic import hint_of, is_unbacked, symbols_in
from partita.graphs.saved_tensors import Memory, NodeRun, Origin

__all__ = ["SavingNotes"]


class SavingNotes:
    """Written while a program runs, node by node.

    Storages are told apart by their address, so they are kept alive until the notes are closed.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._about: dict[Node, _NodeNotes] = {}
        self._now = _NodeNotes()

    def own(self, tensors: Iterable[Tensor]) -> None:
        """The program owns the memory of these."""
        for tensor in tensors:
            self._seen.setdefault(*_seen(tensor, Origin.STATE, None))

    def begin(self, node: Node, read: Iterable[Tensor], flops: int) -> None:
        """What follows is about `node`, which reads these tensors."""
        versions = [(tensor, tensor._version) for tensor in read if not tensor.is_inference()]
        self._now = self._about[node] = _NodeNotes(node, flops, read=versions)

    def packed(self, tensor: Tensor, flops: int) -> object:
        """Autograd saves a tensor; what it gets in its place lives as long as it would have held the tensor."""
        held = _Held()
        self._now.saved.append((self._number(tensor), weakref.ref(held)))
        self._now.flops_until_saved = flops - self._now.flops_before
        return held

    def computed(self, result: Any) -> None:
        """An operator gave something."""
        self._now.computed += map(self._number, tensors_in(result))

    def end(self, given: Sequence[Tensor], origin: Origin, flops: int) -> None:
        """The node is through, and gave these; what it has made so far and is not among them stays inside."""
        now = self._now
        now.given = list(map(self._number, given))
        for number in now.given:
            seen = self._seen[number]
            if seen.node is now.node and seen.origin is Origin.INSIDE:
                seen.origin = origin
        now.written = [self._number(tensor) for tensor, version in now.read if tensor._version != version]
        now.read = []
        now.flops = flops - now.flops_before

    def closed(self) -> Mapping[Node, NodeRun]:
        """What was noted of each node; to be asked for while the results of the program are still there."""
        memory = {number: seen.memory() for number, seen in self._seen.items()}
        return MappingProxyType({node: notes.as_run(memory) for node, notes in self._about.items()})

    def _number(self, tensor: Tensor) -> int:
        number, seen = _seen(tensor, Origin.INSIDE, self._now.node)
        self._seen.setdefault(number, seen)
        return number


class _Held:
    """Stands for a saved tensor."""


@dataclass(slots=True)
class _Seen:
    """A storage, with what is known of it so far."""

    storage: Any
    origin: Origin
    node: Node | None

    def memory(self) -> Memory:
        # Only now: an operator may have made its `out` larger.
        size = self.storage.nbytes()
        return Memory(None if any(map(is_unbacked, symbols_in(size))) else int(hint_of(size)), self.origin, self.node)


def _seen(tensor: Tensor, origin: Origin, node: Node | None) -> tuple[int, _Seen]:
    storage = tensor.untyped_storage()
    return int(storage._cdata), _Seen(storage, origin, node)


@dataclass(slots=True)
class _NodeNotes:
    """What one node does; memory by number."""

    node: Node | None = None
    flops_before: int = 0
    read: list[tuple[Tensor, int]] = field(default_factory=list)
    saved: list[tuple[int, weakref.ref[_Held]]] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    flops: int = 0
    flops_until_saved: int | None = None

    def as_run(self, memory: Mapping[int, Memory]) -> NodeRun:
        def once(numbers: Iterable[int]) -> tuple[Memory, ...]:
            return tuple(memory[number] for number in dict.fromkeys(numbers))

        return NodeRun(
            saves=once(number for number, held in self.saved if held() is not None),
            gives=once(self.given),
            computes=once(self.computed),
            writes=once(self.written),
            flops=self.flops,
            flops_until_saved=self.flops_until_saved,
        )
