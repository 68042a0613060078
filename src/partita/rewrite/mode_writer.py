"""Writing modes: the toggles that take a graph from the mode it is in to the mode that the next node needs."""

from __future__ import annotations

from torch.fx import Node

from partita._torch import toggles
from partita._torch.nodes import GraphWriter
from partita.graphs.modes import AMBIENT, Autocast, Mode

__all__ = ["ModeWriter"]


class ModeWriter:
    """Keeps track of the mode at the end of a graph that is being written.

    The mode of the caller is not known, so it is asked for before it is first changed, and put back by value.
    """

    def __init__(self, writer: GraphWriter) -> None:
        self.mode = AMBIENT
        self.has_switched = False
        self._writer = writer
        self._ambient_grad: Node | None = None
        self._inference: tuple[Node, Mode] | None = None
        self._autocasts: list[tuple[Autocast, Node]] = []

    def switch(self, wanted: Mode) -> None:
        """Writes what it takes to be in mode `wanted`."""
        if wanted is self.mode or wanted == self.mode:
            return
        self.has_switched = True
        self._switch_inference(wanted)
        self._switch_grad(wanted)
        self._switch_autocasts(wanted.autocast)
        self.mode = wanted

    def close(self) -> None:
        """Takes out the question for the caller's grad mode if its answer was never put back."""
        if self._ambient_grad is not None and not self._ambient_grad.users:
            self._writer.graph.erase_node(self._ambient_grad)

    def _switch_inference(self, wanted: Mode) -> None:
        if wanted.inference == self.mode.inference:
            return
        # Autocast and inference blocks may nest but not cross: leaving the one would switch the other.
        self._switch_autocasts(())
        if self._inference is not None:
            entered, before = self._inference
            self._call(toggles.EXIT_INFERENCE, entered)
            self.mode, self._inference = before, None
        if wanted.inference is not None:
            self._ask_for_grad()  # Inside the block it is too late: entering it sets the grad mode as well.
            before = self.mode
            entered = self._call(toggles.ENTER_INFERENCE, wanted.inference)
            self._inference = (entered, before)
            self.mode = Mode(not wanted.inference, wanted.inference)

    def _switch_grad(self, wanted: Mode) -> None:
        if wanted.grad == self.mode.grad:
            return
        self._ask_for_grad()
        self._call(toggles.SET_GRAD, self._ambient_grad if wanted.grad is None else wanted.grad)

    def _ask_for_grad(self) -> None:
        if self._ambient_grad is None and self.mode.grad is None:
            self._ambient_grad = self._call(toggles.IS_GRAD_ENABLED)

    def _switch_autocasts(self, wanted: tuple[Autocast, ...]) -> None:
        shared = 0
        while shared < min(len(wanted), len(self._autocasts)) and wanted[shared] == self._autocasts[shared][0]:
            shared += 1
        while len(self._autocasts) > shared:
            self._call(toggles.EXIT_AUTOCAST, self._autocasts.pop()[1])
        for autocast in wanted[shared:]:
            arguments = (autocast.device, autocast.dtype, autocast.enabled, autocast.cache)
            self._autocasts.append((autocast, self._call(toggles.ENTER_AUTOCAST, *arguments)))

    def _call(self, toggle: object, *arguments: object) -> Node:
        writer = self._writer
        return writer.write("call_function", toggle, arguments, name=writer.names.fresh_for(toggle))
