"""Treatments without a run time of their own: `Call` a body, `Mark` nodes, set modes by operators (`Mode`)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch import nn
from torch.fx import GraphModule

from partita._plain_help import PlainHelp
from partita.analysis.modes import AMBIENT, has_toggles
from partita.errors import OptionError
from partita.plans.treatment import Called, Site
from partita.program.program import Program
from partita.regions import Region
from partita.rewrite.mode_nodes import OperatorFamily
from partita.rewrite.operator_calls import only_call
from partita.rewrite.wrap_modes import WrapStyle, wrap_modes


@final
@dataclass(frozen=True, slots=True)
class Call(metaclass=PlainHelp):
    """Calls the body unchanged, as a submodule; bitwise equal, in any modes."""

    def treat(self, body: GraphModule) -> GraphModule:
        return body

    def sharing_key(self, site: Site) -> Hashable | None:
        """Equal bodies are one submodule."""
        return ()


@final
@dataclass(frozen=True, slots=True)
class LeaveEager(metaclass=PlainHelp):
    """Calls the body unchanged, and inside torch.compile leaves it to Python: the inner backend does not see it."""

    #: No compiler gets the body.
    stays_eager: ClassVar[bool] = True

    def treat(self, body: GraphModule) -> GraphModule:
        return body


@final
@dataclass(frozen=True, slots=True)
class Mark(metaclass=PlainHelp):
    """Writes `value`, the region's name by default, under `key` in the metadata of every node."""

    key: str
    value: object = None

    def marks(self, region: Region) -> Mapping[str, object]:
        return {self.key: region.name if self.value is None else self.value}


@final
@dataclass(frozen=True, slots=True)
class Mode(metaclass=PlainHelp):
    """Runs the body under its grad, inference and autocast modes through higher-order operators instead of toggles.

    `operators="torch"` uses torch's own, for a program that must load without Partita; torch has none for inference
    mode. A region in one mode becomes one call; of a region that holds several, the body calls the operators.
    """

    operators: OperatorFamily = "partita"

    #: An operator restores the modes of its caller.
    puts_back_modes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.operators not in ("partita", "torch"):
            raise OptionError(f'Mode uses the operators of "partita" or of "torch", not of {self.operators!r}')

    def treat(self, body: GraphModule) -> nn.Module | Called:
        return self._treated(Program(body))

    def treat_at(self, body: GraphModule, site: Site) -> nn.Module | Called:
        return self._treated(Program(body, caller=site.caller))

    def sharing_key(self, site: Site) -> Hashable | None:
        """Equal bodies that set modes are one; others become nodes of the program, each where it is called."""
        if site.program is None:
            return None
        modes, number = site.program.modes, site.program.index.number
        return () if any(modes.at(number[node]) != AMBIENT for node in site.region.nodes) else None

    def _treated(self, program: Program) -> nn.Module | Called:
        body, module = program.graph_module, wrap_modes(program, WrapStyle(self.operators)).graph_module
        if not has_toggles(body.graph):
            return Called(module, inlined=True)  # Only bodies of its operators switch modes.
        single = only_call(module)
        return module if single is None else Called(*single)
