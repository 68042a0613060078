"""Eager: no compiler at all, the body as it is; for tests, and to tell a compiler's faults from a partition's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch.fx import GraphModule, Node

from partita.backends.backend import Compiled
from partita.graphs.tolerance import EXACT, Tolerance

__all__ = ["Eager"]


@final
@dataclass(frozen=True, slots=True)
class Eager:
    """Runs the body node by node; takes everything and changes no bit."""

    name: ClassVar[str] = "eager"
    tolerance: ClassVar[Tolerance] = EXACT
    trains: ClassVar[bool] = True
    takes_symbols: ClassVar[bool] = True

    def refusal(self, node: Node) -> str | None:
        """Nothing is refused."""
        return None

    def compile(self, body: GraphModule, inputs: Sequence[object]) -> Compiled:
        """The body itself."""
        return body.forward
