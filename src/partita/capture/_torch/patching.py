"""Scoped patches of torch while a model is traced, and those of the tracer itself and of torch.utils.checkpoint.

All are undone in reverse order, and do nothing in threads that trace no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from keyword import iskeyword
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.modes import enabled_autocast
from partita.capture._torch.recorder import Recorder, Seen, current_recorder, listening_recorder
from partita.errors import CaptureError

#: The key under which nodes are annotated with the number of the checkpoint that they ran in.
CHECKPOINT = "checkpoint"

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Patch:
    """A new value for an attribute of a module or class."""

    owner: Any
    name: str
    value: Any


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Sets the attributes, and restores them on exit, after errors too."""
    originals: list[Patch] = []
    try:
        for patch in patches:
            # A class may have inherited the attribute, and a classmethod must be restored as one.
            originals.append(replace(patch, value=vars(patch.owner).get(patch.name, _ABSENT)))
            setattr(patch.owner, patch.name, patch.value)
        yield
    finally:
        for patch in reversed(originals):
            if patch.value is _ABSENT:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.value)


#: Called with the recorder, the original method, and the arguments of the call.
Action: TypeAlias = Callable[..., Any]


def recorded_patch(owner: Any, name: str, action: Action) -> Patch:
    """Replaces the method `name` of a class by `action` in the thread that traces a model."""
    original = vars(owner)[name]

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        recorder = listening_recorder()
        if recorder is None:
            return original(*args, **kwargs)
        return action(recorder, original, *args, **kwargs)

    return Patch(owner, name, method)


def fill_tables() -> None:
    """Fills the tables that torch builds once, by looking functions up by name, before any of these is patched.

    Otherwise torch would keep a patched function for the rest of the process, and Dynamo would not know the original.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch.overrides import get_ignored_functions, get_overridable_functions

    trace_rules.get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()
    get_ignored_functions()
    get_overridable_functions()


def node_patches() -> list[Patch]:
    """Reports to the recorder, for each node that torch's tracer writes, the actual modes and the constants read."""
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    original = vars(PythonKeyTracer)["create_node"]

    @wraps(original)
    def create_node(tracer: Any, kind: str, target: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        recorder = current_recorder()
        if recorder is not None and isinstance(target, OpOverload) and iskeyword(_overload_name(target)):
            target, args = _without_keyword(target, args)
        node = original(tracer, kind, target, args, *rest, **kwargs)
        if recorder is not None:
            recorder.seen[node] = _seen()
            if recorder.checkpoint is not None and kind.startswith("call_"):
                node.meta["custom"] = {**node.meta.get("custom", {}), CHECKPOINT: recorder.checkpoint}
            if kind == "get_attr":
                recorder.constants.on_constant(node, getattr(tracer.root, target, None))
            else:
                recorder.constants.on_operator(node)
        return node

    return [Patch(PythonKeyTracer, "create_node", create_node)]


def _without_keyword(target: OpOverload, args: tuple[Any, ...]) -> tuple[OpOverload, tuple[Any, ...]]:
    """The call by an overload that torch.fx can write as code, which `torch.ops.aten.random_.from` is not (2.13)."""
    if target is getattr(torch.ops.aten.random_, "from") and args[1:2] == (0,) and args[2] is not None:
        return torch.ops.aten.random_.to, (args[0], args[2])
    raise CaptureError(
        f"torch.fx cannot write a call of {target}, since {_overload_name(target)!r} is a keyword of Python; for "
        "x.random_(low, high), write x.copy_(torch.randint_like(x, low, high)), which generates the same numbers"
    )


def _overload_name(target: OpOverload) -> str:
    return str(target).rpartition(".")[2]


def _seen() -> Seen:
    return Seen(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), enabled_autocast())


_GENERATOR = "_checkpoint_without_reentrant_generator"


def checkpoint_patches() -> list[Patch]:
    """Turns both implementations of `torch.utils.checkpoint` into plain calls, with the same values and gradients.

    What to recompute is decided by a treatment of the graph; nodes are annotated with the number of their checkpoint.
    Traced as they are, reentrant checkpoints hide their function from autograd, and selective ones push their own modes
    above the tracer's.
    """
    generator, function = getattr(checkpoint, _GENERATOR), checkpoint.CheckpointFunction

    @wraps(generator)
    def around_call(fn: Any, preserve_rng_state: Any, context_fn: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
        recorder = listening_recorder()
        if recorder is None:
            yield from generator(fn, preserve_rng_state, context_fn, *rest, **kwargs)
            return
        forward_context, _ = context_fn()
        # A mode that selects the tensors saved for backward has nothing to save here.
        selects = isinstance(forward_context, TorchDispatchMode)
        with _annotated(recorder), nullcontext() if selects else forward_context:
            yield

    class PlainCheckpointFunction(function):  # type: ignore[misc, valid-type]
        @classmethod
        def apply(cls, run: Callable[..., Any], preserve: Any, *args: Any) -> Any:
            recorder = listening_recorder()
            if recorder is None:
                return function.apply(run, preserve, *args)
            with _annotated(recorder):
                return run(*args)

    return [
        Patch(checkpoint, _GENERATOR, around_call),
        Patch(checkpoint, "CheckpointFunction", PlainCheckpointFunction),
    ]


@contextmanager
def _annotated(recorder: Recorder) -> Iterator[None]:
    """Inside, nodes are annotated with the number of a checkpoint; of nested ones, the outermost counts."""
    if recorder.checkpoint is not None:
        yield
        return
    recorder.checkpoints += 1
    recorder.checkpoint = recorder.checkpoints
    try:
        yield
    finally:
        recorder.checkpoint = None
