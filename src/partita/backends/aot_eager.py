"""AOTAutograd alone: the body as forward and backward graphs of core operators, run without a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch.fx import GraphModule, Node

from partita._torch.backend_aot import compile_ahead
from partita._torch.backend_draws import check_draws
from partita.backends.adapting import adapt
from partita.backends.backend import Compiled
from partita.backends.calling import CompiledBody
from partita.backends.refusals import refusal_by_tracing
from partita.graphs.tolerance import Tolerance

__all__ = ["AotEager"]


@final
@dataclass(frozen=True, slots=True)
class AotEager:
    """Traces what Inductor would trace and then runs it eagerly; values have the bits that eager gives them.

    A region that goes wrong here goes wrong in tracing, not in a compiler. Gradients of a value with several uses are
    summed region by region.
    """

    name: ClassVar[str] = "aot_eager"
    tolerance: ClassVar[Tolerance] = Tolerance(rounding=torch.finfo(torch.float64).eps)
    trains: ClassVar[bool] = True
    takes_symbols: ClassVar[bool] = True
    picks_kernels: ClassVar[bool] = True

    def refusal(self, node: Node) -> str | None:
        """Why AOTAutograd cannot trace `node`."""
        return refusal_by_tracing(node)

    def compile(self, body: GraphModule, inputs: Sequence[object]) -> Compiled:
        """What AOTAutograd makes of the body."""
        check_draws(body, inputs)
        adapted = adapt(body, inputs)
        function = compile_ahead(body, adapted.inputs)
        return CompiledBody(function, adapted.calling())
