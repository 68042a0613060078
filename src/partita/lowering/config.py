"""What was decided before the first call; failures; mode scope."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch.fx import GraphModule

from partita.lowering.signature import DynamicSizes
from partita.lowering.variant import Cause
from partita.plans.failures import Failure, Failures, report
from partita.program.body_effects import EffectfulNodes

__all__ = ["Lowering", "ModeScope"]


# How a region is lowered: under which modes, what is known of its body, and where failures go.


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
    acts: EffectfulNodes = field(default_factory=EffectfulNodes)
    #: The key of the modules in the body for which this is so.
    modules: tuple[Hashable, ...] = ()
    open_sizes: DynamicSizes = field(default_factory=DynamicSizes)
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
        acts = EffectfulNodes(
            self.acts.acting.union(called), self.acts.draws.union(called), self.acts.written_later.difference(inputs)
        )
        return replace(self, written=tuple(range(len(inputs))), acts=acts)

    def report(self, cause: Cause, error: Exception | None = None) -> None:
        """Notes that the region runs eagerly, or raises."""
        failure = Failure(self.region, self.backend, cause.reason, cause.node)
        report(failure, self.failures, strict=self.strict, error=error)


# A mode scope: the grad, inference and autocast state that a body runs under, set around a call and put back.


@final
@dataclass(frozen=True, slots=True)
class ModeScope:
    """What is set; None, or no entry for a device, means: as the caller has it.

    An entry for autocast holds the arguments of `torch.autocast`: device type, dtype, enabled, cache_enabled.
    """

    grad: bool | None = None
    inference: bool | None = None
    autocast: tuple[tuple[str, torch.dtype | None, bool, bool | None], ...] = ()

    @property
    def as_traced(self) -> ModeScope:
        """The same as a tracer can follow it: inference tensors cannot be traced, so gradients are off instead."""
        if self.inference is None:
            return self
        return replace(self, grad=False if self.inference else self.grad, inference=None)

    def call(self, function: Callable[[Sequence[Any]], Any], inputs: Sequence[Any]) -> Any:
        """What `function` gives in this scope; nested calls, since Dynamo follows no stack of contexts."""
        if self.inference is not None:
            with torch.inference_mode(self.inference):
                return replace(self, inference=None).call(function, inputs)
        if self.grad is not None:
            with torch.set_grad_enabled(self.grad):
                return replace(self, grad=None).call(function, inputs)
        if self.autocast:
            with torch.autocast(*self.autocast[0]):
                return replace(self, autocast=self.autocast[1:]).call(function, inputs)
        return function(inputs)
