"""What is switched on where a graph is cut in order: the blocks that a part must leave and the next one enter again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Node

from partita._torch import toggles
from partita.analysis.modes import only_argument
from partita.errors import ModeError

__all__ = ["NOTHING_OPEN", "OpenModes"]


_ENTERS = frozenset((toggles.ENTER_AUTOCAST, toggles.ENTER_INFERENCE))
_EXITS = frozenset((toggles.EXIT_AUTOCAST, toggles.EXIT_INFERENCE))


@dataclass(frozen=True, slots=True)
class OpenModes:
    """The nodes that entered the open blocks, in order, and the last one that set the grad mode."""

    blocks: tuple[Node, ...] = ()
    grad: Node | None = None
    #: What `grad` was where each open inference block was entered: leaving the block puts that back.
    grad_before: tuple[tuple[Node, Node | None], ...] = ()
    #: Blocks that were left before another one that was entered after them, on the same device.
    crossed: frozenset[Node] = frozenset()

    def after(self, node: Node) -> OpenModes:
        """What is open after `node`."""
        if node.op != "call_function":
            return self
        if node.target is toggles.SET_GRAD:
            return replace(self, grad=node)
        if node.target in _ENTERS:
            return self._entered(node)
        return self._left(only_argument(node, "mode")) if node.target in _EXITS else self  # type: ignore[arg-type]

    def to_enter_again(self, first: Node) -> tuple[Node, ...]:
        """The toggles that a part which begins with `first` repeats: torch repeats the grad mode last."""
        if self.crossed:
            names = ", ".join(sorted(repr(node.name) for node in self.crossed))
            raise ModeError(
                f"the graph is cut before {first.name!r}, where autocast blocks cross: {names} is still open after a "
                "block around it was left; leave blocks in the reverse of the order in which they were entered"
            )
        # A mode that a value puts back is in force as it is: parts run in graph order.
        if self.grad is None or first.target is toggles.SET_GRAD or not _is_constant(self.grad):
            return self.blocks
        before = [block for block in self.blocks if block.target is toggles.ENTER_INFERENCE and block > self.grad]
        place = self.blocks.index(before[0]) if before else len(self.blocks)
        return (*self.blocks[:place], self.grad, *self.blocks[place:])

    def _entered(self, node: Node) -> OpenModes:
        if node.target is toggles.ENTER_AUTOCAST:
            return replace(self, blocks=(*self.blocks, node))
        if not node.users:
            return self  # The block ends when its handle is dropped, at once.
        return replace(self, blocks=(*self.blocks, node), grad_before=(*self.grad_before, (node, self.grad)))

    def _left(self, entered: Node) -> OpenModes:
        inner = self.blocks[self.blocks.index(entered) + 1 :]
        crossed = self.crossed.union(node for node in inner if _device(node) == _device(entered))
        return OpenModes(
            tuple(block for block in self.blocks if block is not entered),
            dict(self.grad_before).get(entered, self.grad),
            tuple(pair for pair in self.grad_before if pair[0] is not entered),
            crossed - {entered},
        )


def _is_constant(set_grad: Node) -> bool:
    return isinstance(only_argument(set_grad, "enabled"), bool)


def _device(entered: Node) -> object:
    return entered.args[0] if entered.args else entered.kwargs.get("device_type")


NOTHING_OPEN = OpenModes()
