"""How a region is lowered: under which modes, what is known of its body, and where failures go."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import final

from torch.fx import GraphModule

from partita.runtime.failures import Failure, Failures, report
from partita.runtime.mode_scope import ModeScope
from partita.runtime.open_sizes import OpenSizes
from partita.runtime.rehearsal import Acts
from partita.runtime.variant import Cause

__all__ = ["Lowering"]


@final
@dataclass(frozen=True, slots=True)
class Lowering:
    """All that was decided before the first call."""

    region: str
    #: Which backend compiles, and whether gradients flow through what it makes.
    backend: str
    trains: bool = True
    #: Whether it keeps the kernels that eager mode picks.
    picks_kernels: bool = False
    #: The modes that the body runs under; None for those of the caller.
    scope: ModeScope | None = None
    #: The places of the inputs that the body writes.
    written: tuple[int, ...] = ()
    acts: Acts = field(default_factory=Acts)
    #: The key of the modules in the body for which this is so.
    modules: tuple[Hashable, ...] = ()
    open_sizes: OpenSizes = field(default_factory=OpenSizes)
    strict: bool = False
    #: What the region is called in a profile.
    tag: str = ""
    #: What it is called in a log: which region of how many.
    title: str = ""
    failures: Failures = field(default_factory=Failures, compare=False)

    def for_modules(self, key: tuple[Hashable, ...], body: GraphModule) -> Lowering:
        """The same for modules of this key in `body`: those that were changed may write any input, and draw."""
        if key == self.modules:
            return self
        inputs = [node.name for node in body.graph.find_nodes(op="placeholder")]
        called = [node.name for node in body.graph.find_nodes(op="call_module")]
        acts = Acts(
            self.acts.acting.union(called), self.acts.draws.union(called), self.acts.written_later.difference(inputs)
        )
        return replace(self, written=tuple(range(len(inputs))), acts=acts)

    def report(self, cause: Cause, error: Exception | None = None) -> None:
        """Notes that the region runs eagerly, or raises."""
        failure = Failure(self.region, self.backend, cause.reason, cause.node)
        report(failure, self.failures, strict=self.strict, error=error)
