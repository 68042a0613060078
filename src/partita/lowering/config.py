"""The configuration of a lowered region, fixed before its first call, and the modes that its body runs under."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch.fx import GraphModule

from partita.analysis.effects.modules import may_use_rng
from partita.analysis.effects.terms import PURE, UNKNOWN, Effects
from partita.lowering.signature import DynamicSizes
from partita.lowering.variant import Cause, Variant
from partita.plans.compilations import Compilations, CompiledBody, Failure, Failures
from partita.program.program import Program


@final
@dataclass(frozen=True, slots=True)
class CudaGraphOptions:
    """For which sizes calls of a region are recorded, and which inputs of its body stay where they are in memory."""

    #: None for all sizes.
    sizes: tuple[int, ...] | None = None
    static_inputs: tuple[int, ...] = ()
    #: The nodes that check something: metadata, or data on the device.
    assertions: frozenset[str] = frozenset()


@final
@dataclass(frozen=True, slots=True)
class Lowering:
    """How a region is lowered: by which backend, under which modes, with which effects, and where failures go."""

    region: str
    #: The backend, and whether gradients flow through its functions.
    backend: str
    trains: bool = True
    #: Whether the backend keeps the kernels that eager mode picks.
    picks_kernels: bool = False
    #: The modes that the body runs under; None for those of the caller.
    scope: ModeScope | None = None
    #: The effects of the nodes that have some, by name.
    effects: Mapping[str, Effects] = field(default_factory=dict)
    #: The positions of inputs that the body mutates; all of them if an unknown function is called.
    mutated_inputs: tuple[int, ...] = ()
    #: Nodes, inputs among them, whose storage other code mutates after the body has run, where the call site is known.
    mutated_later: frozenset[str] = frozenset()
    #: The key of the modules for which the effects were computed.
    modules: tuple[Hashable, ...] = ()
    dynamic_sizes: DynamicSizes = field(default_factory=DynamicSizes)
    #: The inputs that are compiled in as constants, where the backend wants them; else None.
    constants: tuple[int, ...] | None = None
    #: How calls are recorded as CUDA graphs; None if they are not.
    cuda_graphs: CudaGraphOptions | None = None
    strict: bool = False
    #: The name of the region in a profile.
    tag: str = ""
    #: Its name in a log: which region of how many.
    title: str = ""
    failures: Failures = field(default_factory=Failures, compare=False)
    compilations: Compilations = field(default_factory=Compilations, compare=False)

    def for_modules(self, key: tuple[Hashable, ...], body: GraphModule) -> Lowering:
        """The same for modules of this key in `body`: changed modules may mutate any input and use random numbers."""
        if key == self.modules:
            return self
        inputs = [node.name for node in body.graph.find_nodes(op="placeholder")]
        called = [node.name for node in body.graph.find_nodes(op="call_module")]
        return replace(
            self,
            effects={**self.effects, **dict.fromkeys(called, UNKNOWN)},
            mutated_inputs=tuple(range(len(inputs))),
            mutated_later=self.mutated_later.difference(inputs),
        )

    def report(self, cause: Cause, error: Exception | None = None) -> None:
        """Records that the region runs eagerly, or raises."""
        failure = Failure(self.region, self.backend, cause.reason, cause.node)
        self.failures.report(failure, strict=self.strict, error=error)

    def note(self, variant: Variant, values: Sequence[Any], *, user: object) -> None:
        """Records that `user`, the dispatcher of the region, calls a function of a variant with inputs like these."""
        if variant.function is None:
            return
        origin, fit = variant.origin, variant.fit
        is_own = origin is not None and origin.user() is user
        self.compilations.add(
            CompiledBody(
                self.region,
                self.backend,
                fit.described(values),
                fit.signature.needs_gradients,
                origin.seconds if origin is not None and is_own else 0.0,
                shared_with=None if origin is None or is_own else origin.region,
                loaded=origin is None,
            )
        )


def effects_by_name(body: Program) -> dict[str, Effects]:
    """The effects of the nodes that have some, or would in training mode; without tensors, to be pickled."""
    found = {node.name: replace(effects, mutated_state=()) for node, effects in body.calls.effectful.items()}
    for node in body.graph.find_nodes(op="call_module"):
        if may_use_rng(body.calls.called_module(node)):
            found[node.name] = replace(found.get(node.name, PURE), uses_rng=True)
    return found


@final
@dataclass(frozen=True, slots=True)
class ModeScope:
    """The grad, inference and autocast modes of a body, set during a call and restored after it.

    None, or no entry for a device, means that of the caller.

    An entry for autocast holds the arguments of `torch.autocast`: device type, dtype, enabled, cache_enabled.
    """

    grad: bool | None = None
    inference: bool | None = None
    autocast: tuple[tuple[str, torch.dtype | None, bool, bool | None], ...] = ()

    @property
    def as_traced(self) -> ModeScope:
        """The same for a tracer: inference tensors cannot be traced, so gradients are disabled instead."""
        if self.inference is None:
            return self
        return replace(self, grad=False if self.inference else self.grad, inference=None)

    def call(self, function: Callable[[Sequence[Any]], Any], inputs: Sequence[Any]) -> Any:
        """The result of `function` in this scope; nested calls, since Dynamo cannot trace a stack of contexts."""
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
