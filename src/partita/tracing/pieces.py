"""Pieces: regions on their way to a compiler, and what stands in their place afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.fx import Graph, GraphModule, Interpreter

from partita.graphs.tolerance import Tolerance
from partita.plans.treatment import Called, Site, Treatment, Treats, TreatsAt, marks_suffice, mixes_modes, tolerance_of

__all__ = ["Compiled", "Piece", "Waiting"]


@final
class Piece(nn.Module):
    """A region's body and what its treatment made of it; it waits for its compiler and is never called."""

    def __init__(self, body: GraphModule, treated: nn.Module, left_because: str | None) -> None:
        super().__init__()
        #: Why no compiler may have it.
        self.left_because = left_because
        self.body = body
        self.treated = treated
        #: Compilers own the graph that they are given and may change it, so its meaning is kept apart.
        self.graph: Graph = copy.deepcopy(body.graph)

    def interpreter(self, kind: type[Interpreter]) -> Interpreter:
        """What runs the body node by node, without generating code for it."""
        return kind(self.body, graph=self.graph)


@final
class Compiled(nn.Module):
    """The function that a compiler gave, called as a module."""

    def __init__(self, function: Callable[..., Sequence[Any]]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Sequence[Any]:
        return self._function(*args)


@final
@dataclass(frozen=True, slots=True)
class Waiting:
    """A treatment whose result waits as a piece instead of being called."""

    treatment: Treatment

    @property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.treatment)

    @property
    def mixes_modes(self) -> bool:
        return mixes_modes(self.treatment)

    def treat_at(self, body: GraphModule, site: Site) -> Piece:
        given: nn.Module | Called = body
        if marks_suffice(self.treatment):
            pass  # The compiler of the piece reads them.
        elif isinstance(self.treatment, TreatsAt):
            given = self.treatment.treat_at(body, site)
        elif isinstance(self.treatment, Treats):
            given = self.treatment.treat(body)
        # A piece is compiled as a whole, so it sets its modes itself and needs no operator for that.
        return Piece(body, body if isinstance(given, Called) else given, _divided_hook(site))


def _divided_hook(site: Site) -> str | None:
    if site.program is None or len(site.region.nodes) == len(site.program.operators()):
        return None  # What is compiled whole has all gradients.
    nodes = set(site.region.nodes)
    tensors = (one for one in site.program.hooked_tensors if one.is_certain)
    hooked = next((one for one in tensors if one.is_divided_by(nodes)), None)
    return None if hooked is None else f"has a share in the gradients that the hook {hooked.hook.name!r} gets"
