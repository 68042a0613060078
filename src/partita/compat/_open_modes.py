"""The mode blocks that are open where a graph is cut in order: a part exits them, and the next one reenters them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Node

from partita._torch import toggles
from partita.analysis.modes import only_argument
from partita.errors import ModeError

_ENTERS = frozenset((toggles.ENTER_AUTOCAST, toggles.ENTER_INFERENCE))
_EXITS = frozenset((toggles.EXIT_AUTOCAST, toggles.EXIT_INFERENCE))


@dataclass(frozen=True, slots=True)
class OpenModes:
    """The nodes that entered the open blocks, in order, and the last node that set the grad mode."""

    blocks: tuple[Node, ...] = ()
    grad: Node | None = None
    #: What `grad` was where each open inference block was entered: exiting the block restores it.
    grad_before: tuple[tuple[Node, Node | None], ...] = ()
    #: Blocks on one device that are still open although a block around them was exited.
    crossed: frozenset[Node] = frozenset()

    def after(self, node: Node) -> OpenModes:
        """What is open after `node`."""
        if node.op != "call_function":
            return self
        if node.target is toggles.SET_GRAD:
            return replace(self, grad=node)
        if node.target in _ENTERS:
            return self._entered(node)
        return self._exited(only_argument(node, "mode")) if node.target in _EXITS else self  # type: ignore[arg-type]

    def to_reenter(self, first: Node) -> tuple[Node, ...]:
        """The toggles that a part which begins with `first` repeats: torch repeats the grad mode last."""
        if self.crossed:
            names = ", ".join(sorted(repr(node.name) for node in self.crossed))
            raise ModeError(
                f"the graph is cut before {first.name!r}, where autocast blocks cross: {names} is still open after a "
                "block around it was left; leave blocks in the reverse of the order in which they were entered"
            )
        if self.grad is None or first.target is toggles.SET_GRAD:
            return self.blocks
        # A grad mode that is a value of the graph needs no repetition: parts run in graph order.
        if not isinstance(only_argument(self.grad, "enabled"), bool):
            return self.blocks
        later = [block for block in self.blocks if block.target is toggles.ENTER_INFERENCE and block > self.grad]
        place = self.blocks.index(later[0]) if later else len(self.blocks)
        return (*self.blocks[:place], self.grad, *self.blocks[place:])

    def _entered(self, node: Node) -> OpenModes:
        if node.target is toggles.ENTER_AUTOCAST:
            return replace(self, blocks=(*self.blocks, node))
        if not node.users:
            return self  # Its handle is dropped at once, which ends the block.
        return replace(self, blocks=(*self.blocks, node), grad_before=(*self.grad_before, (node, self.grad)))

    def _exited(self, entered: Node) -> OpenModes:
        inner = self.blocks[self.blocks.index(entered) + 1 :]
        crossed = self.crossed.union(node for node in inner if _device(node) == _device(entered))
        return OpenModes(
            tuple(block for block in self.blocks if block is not entered),
            dict(self.grad_before).get(entered, self.grad),
            tuple(pair for pair in self.grad_before if pair[0] is not entered),
            crossed - {entered},
        )


def _device(entered: Node) -> object:
    return entered.args[0] if entered.args else entered.kwargs.get("device_type")


NOTHING_OPEN = OpenModes()
