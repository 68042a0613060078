"""What is known of a joint graph: a forward and its backward in one, and what the one holds for the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

from torch.fx import Node

__all__ = ["Held", "Joint"]


@final
@dataclass(frozen=True, slots=True)
class Held:
    """One storage that lives from the forward until the backward has read it."""

    #: The values on this storage that the backward reads, in graph order; all but one are views.
    nodes: tuple[Node, ...]
    #: The bytes of the whole storage, of which a value may be a part; None where they are not known.
    bytes: int | None
    #: Whether it is that of an input (a parameter, a buffer, an argument) or of a constant, and lives anyway.
    is_input: bool

    @property
    def node(self) -> Node:
        """The first of the nodes."""
        return self.nodes[0]


@final
@dataclass(frozen=True, slots=True)
class Joint:
    """What a joint graph takes and gives, its two halves, and what is held from the one to the other.

    A node is of the backward if it depends on a tangent, or if its tracer said so and no output of the forward needs
    it. Nodes are in graph order; inputs and the output node are in neither half.
    """

    #: The inputs of the forward: parameters, buffers and arguments (AOTAutograd's primals).
    inputs: tuple[Node, ...]
    #: The inputs of the backward: gradients of outputs of the forward.
    tangents: tuple[Node, ...]
    #: What the forward gives: first new values for the inputs in `written`, then results. Constants are themselves.
    forward_outputs: tuple[Any, ...]
    #: What the backward gives: the gradient of each input, or None. (Graphs of other tracers may leave out the Nones.)
    gradients: tuple[Any, ...]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    #: What the backward reads of the forward and its inputs if nothing is computed again; one entry for each storage.
    held: tuple[Held, ...]
    #: Names of the parameters and buffers that come first among the inputs, where the tracer has written them down.
    state: tuple[str, ...]
    #: The inputs that the model writes, where the tracer has written them down.
    written: tuple[Node, ...]

    @property
    def held_bytes(self) -> int | None:
        """The bytes that are held beside the inputs, which live anyway; None where a size is not known."""
        return _total(entry.bytes for entry in self.held if not entry.is_input)

    @property
    def held_input_bytes(self) -> int | None:
        """The bytes of the inputs that the backward reads; None where a size is not known."""
        return _total(entry.bytes for entry in self.held if entry.is_input)


def _total(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total
