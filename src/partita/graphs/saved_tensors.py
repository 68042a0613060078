"""Saved tensors: what autograd holds for the backward once a program has run, by node, from the traced values alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import final

from torch.fx import Node

from partita.graphs.program import Program

__all__ = ["Memory", "NodeRun", "Origin", "SavedTensors", "bytes_in"]


class Origin(Enum):
    """Where memory comes from."""

    #: A parameter, a buffer or a constant, which the program holds anyway.
    STATE = "state"
    #: An input of the program.
    INPUT = "input"
    #: The result of a node.
    RESULT = "result"
    #: Something that a node has made and shows to nobody, like the mask of a dropout.
    INSIDE = "inside"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """One storage, whoever looks into it; `node` is what brought it into the program, None for what a module owns."""

    #: None where that is only known once the program runs.
    bytes: int | None
    origin: Origin
    node: Node | None = None


@final
@dataclass(frozen=True, slots=True)
class NodeRun:
    """What one node does to memory."""

    #: What autograd saves for it, and still holds when the program is through; each once.
    saves: tuple[Memory, ...] = ()
    #: What its result lives in.
    gives: tuple[Memory, ...] = ()
    #: What the operators make that it comes down to; looking at memory is not making it.
    computes: tuple[Memory, ...] = ()
    #: What was there before, and is written.
    writes: tuple[Memory, ...] = ()
    flops: int = 0
    #: How many of the FLOPs are done when autograd saves something for the last time; None if it saves nothing.
    flops_until_saved: int | None = None


@final
@dataclass(frozen=True, slots=True)
class SavedTensors:
    """What a forward run of `program` with gradients saves; nothing is known where there is a `reason`.

    Symbolic sizes count as they were in the trace. What is saved and let go of again, since no output needs it, is not
    held. A body of an operator counts as part of the node that runs it.
    """

    program: Program
    nodes: Mapping[Node, NodeRun] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    reason: str | None = None
    #: The nodes that write to what was there before, by what they write, in order.
    writers: Mapping[Memory, Sequence[Node]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        writers: dict[Memory, list[Node]] = {}
        for node, run in self.nodes.items():
            for memory in run.writes:
                writers.setdefault(memory, []).append(node)
        object.__setattr__(self, "writers", MappingProxyType(writers))

    def of(self, node: Node) -> NodeRun:
        """What `node` does."""
        return self.nodes.get(node, _NOTHING)

    def held(self, nodes: Iterable[Node] | None = None) -> frozenset[Memory]:
        """What autograd holds for these nodes, or for all; state is left out, since it is held anyway."""
        found = (memory for node in (self.nodes if nodes is None else nodes) for memory in self.of(node).saves)
        return frozenset(memory for memory in found if memory.origin is not Origin.STATE)


def bytes_in(memory: Iterable[Memory]) -> int | None:
    """The bytes of several storages; None where some are not known."""
    sizes = [one.bytes for one in memory]
    return None if None in sizes else sum(size for size in sizes if size is not None)


_NOTHING = NodeRun()
