"""Scoped monkeypatches of torch, and those of tracer and checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.modes import read_ambient
from partita.capture._torch.recorder import Seen, current_recorder, listening_recorder

__all__ = ["Action", "Patch", "checkpoint_swaps", "fill_tables", "node_swaps", "patched", "recorded_patch"]


# Checkpointed calls of a model that is being traced: plain calls, with the same values and gradients.
#
# What a checkpoint saves and computes again is the business of whoever runs the graph. Traced as they are, reentrant
# checkpoints hide their function from autograd, and selective ones put their own modes over the tracer's.


_GENERATOR = "_checkpoint_without_reentrant_generator"


def checkpoint_swaps() -> list[Patch]:
    """The two ways in which `torch.utils.checkpoint` goes on, each with a plain call in its place."""
    generator, function = getattr(checkpoint, _GENERATOR), checkpoint.CheckpointFunction

    @wraps(generator)
    def around_call(fn: Any, preserve_rng_state: Any, context_fn: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
        if listening_recorder() is None:
            yield from generator(fn, preserve_rng_state, context_fn, *rest, **kwargs)
            return
        forward_context, _ = context_fn()
        # A mode that keeps chosen results for the backward has nothing to keep here.
        with nullcontext() if isinstance(forward_context, TorchDispatchMode) else forward_context:
            yield

    class PlainCheckpointFunction(function):  # type: ignore[misc, valid-type]
        @classmethod
        def apply(cls, run: Callable[..., Any], preserve: Any, *args: Any) -> Any:
            return function.apply(run, preserve, *args) if listening_recorder() is None else run(*args)

    return [
        Patch(checkpoint, _GENERATOR, around_call),
        Patch(checkpoint, "CheckpointFunction", PlainCheckpointFunction),
    ]


# Every node that torch's tracer writes: the modes that were really in force, and the tensors that it has just met.


def node_swaps() -> list[Patch]:
    """The method by which torch's tracer writes a node, which tells the recorder."""
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    original = vars(PythonKeyTracer)["create_node"]

    @wraps(original)
    def create_node(tracer: Any, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        node = original(tracer, kind, target, *args, **kwargs)
        recorder = current_recorder()
        if recorder is not None:
            recorder.seen[node] = _seen()
            if kind == "get_attr":
                recorder.constants.meet(node, getattr(tracer.root, target, None))
            else:
                recorder.constants.pass_on(node)
        return node

    return [Patch(PythonKeyTracer, "create_node", create_node)]


def _seen() -> Seen:
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    if torch._C._is_any_autocast_enabled():
        autocast = tuple((device, dtype) for device, enabled, dtype in read_ambient().autocast if enabled)
    return Seen(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


# Methods that tell the recorder what they do while a model is traced, and do only their own work anywhere else.


#: Called with the recorder, the original method, and what the method was called with.
Action: TypeAlias = Callable[..., Any]


def recorded_patch(owner: Any, name: str, action: Action) -> Patch:
    """The method `name` of a class, with `action` in its place in the thread that traces a model."""
    original = vars(owner)[name]

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        recorder = listening_recorder()
        if recorder is None:
            return original(*args, **kwargs)
        return action(recorder, original, *args, **kwargs)

    return Patch(owner, name, method)


# Attributes of torch that hold something else for a while: set one by one, put back in reverse order.


_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """What an attribute of a module or class is to hold."""

    owner: Any
    name: str
    value: Any


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Inside, the attributes hold the new values; afterwards, whatever happened, those that they held before."""
    found: list[Patch] = []
    try:
        for patch in patches:
            # A class may have inherited the attribute, and a classmethod must be put back as one.
            found.append(Patch(patch.owner, patch.name, vars(patch.owner).get(patch.name, _ABSENT)))
            setattr(patch.owner, patch.name, patch.value)
        yield
    finally:
        for patch in reversed(found):
            if patch.value is _ABSENT:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.value)


# Tables that torch fills once, by looking functions up by name: filled before a capture swaps any of these.
#
# Else torch would keep a stand-in for the rest of the process, and Dynamo would no longer know the function itself.


def fill_tables() -> None:
    """Fills the tables of Dynamo, which every export imports, and those of functions that can be overridden."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch.overrides import get_ignored_functions, get_overridable_functions

    trace_rules.get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()
    get_ignored_functions()
    get_overridable_functions()
