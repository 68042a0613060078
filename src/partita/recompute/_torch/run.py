"""Runs the body of a checkpoint, and again in the backward with the RNG state saved before; or tags it in a trace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from partita._torch.functorch import count_levels
from partita._torch.modes import variable_set
from partita._torch.pytrees import leaves_of
from partita.errors import OptionError, RecomputeError
from partita.hops._torch.body import run_body
from partita.hops._torch.node_tags import SAVED, next_graph_id, node_tags, saving, tagging
from partita.recompute._torch.captured_state import (
    BodyState,
    CapturedLeaves,
    TensorWatch,
    captured_tensors,
    refuse_generators,
    refuse_unrepeatable,
)
from partita.recompute._torch.checkpoint_plan import CheckpointPlan, plan_of_body, saves_before_mutation
from partita.recompute._torch.inputs import RunInputs, named_tensors
from partita.recompute._torch.keep import KeptResults
from partita.recompute._torch.saved_tensor_hooks import SavedVersions, hooks_ignoring_traces
from partita.recompute._torch.traced_steps import TracedStep, run_kept_in_step, traces_whole_step

#: Dynamo skips the frames of this module: they run around bodies after a graph break.
DYNAMO_SKIPS = True


def run_tagged(
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    keywords: Mapping[str, Any],
    *,
    context_fn: ContextFunction | None,
    saved: Collection[Node],
) -> Any:
    """Traces `body`; its nodes are tagged for a partitioner to be recomputed, except for `saved`.

    A selective context function decides node by node. Where the backward is traced too, the body runs again there;
    otherwise the compiler recomputes it later.
    """
    is_saved = (node_tags() or {}).get("recompute") is CheckpointPolicy.MUST_SAVE
    if is_saved:
        return run_body(nullcontext(), body, operands, keywords)
    if not _may_save(body, operands, keywords):
        with saving(saved):  # Nodes after the body may save what it has mutated.
            return run_body(nullcontext(), body, operands, keywords)
    first, again = (None, None) if context_fn is None else context_fn()
    number = next_graph_id()
    run: Callable[[], Any] = partial(run_body, nullcontext(), body, operands, keywords)
    if traces_whole_step() and not _cannot_recompute():
        run = TracedStep(body, operands, keywords, again).first
    if first is None:
        with tagging({"ac_graph_id": number, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}), saving(saved):
            return run()
    if hasattr(first, "ac_graph_id"):
        first.ac_graph_id = number
    with tagging({"ac_graph_id": number}), first:
        return run()


def _may_save(body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Whether autograd may save anything: compilers refuse tagged RNG operators in graphs without a backward."""
    state = body.parameters() if isinstance(body, nn.Module) else ()
    leaves = (*leaves_of((operands, dict(keywords))), *state)
    return torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def run_kept_tagged(body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Runs `body`; inside a checkpoint that tags nodes, its nodes are tagged as saved."""
    is_recomputed = bool(node_tags())
    with tagging(SAVED) if is_recomputed else nullcontext():
        return run_kept_in_step(partial(run_body, nullcontext(), body, operands, keywords))


def tag_nodes(gmod: Any, is_sac: bool) -> Any:  # noqa: FBT001  The signature is torch's.
    """Tags every call of a graph, in place: to be decided by a selective policy, or to be recomputed."""
    number = next_graph_id()
    for node in gmod.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            node.meta["ac_graph_id"] = number
            node.meta["recompute"] = None if is_sac else CheckpointPolicy.PREFER_RECOMPUTE
    return gmod


#: Returns the contexts of the first and of the second run.
ContextFunction = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """The arguments for `torch.utils.checkpoint` that the caller passed."""

    preserve_rng_state: bool = True
    context_fn: ContextFunction | None = None
    #: `determinism_check`, `debug` and `early_stop` where they were passed.
    others: Mapping[str, Any] | None = None


def run_recomputed(
    body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any], options: CheckpointOptions
) -> Any:
    """Runs `body`; its intermediate results are recomputed when the backward needs them."""
    if not torch.is_grad_enabled() or _cannot_recompute():
        return run_body(nullcontext(), body, operands, keywords)
    plan, state = plan_of_body(body), BodyState(body)
    arguments = named_tensors(operands, keywords)
    tensors = {**arguments, **state.tensors()}
    if plan is None:
        values = (*operands, *keywords.values())
        refuse_unrepeatable(body, values)
        tensors |= captured_tensors(body, values)
    else:
        refuse_generators(operands)
    inputs = RunInputs(state, plan, operands, keywords)
    captured = None if plan is not None else CapturedLeaves(body, arguments.values())
    runs = _Runs(body, plan, inputs, captured, options.context_fn)
    before = TensorWatch(tensors) if runs.may_mutate else None
    result = checkpoint(
        runs, *inputs.hand_over(), *_device_markers(tensors.values()), **_checkpoint_arguments(options, plan, body)
    )
    if before is not None:
        inputs.after_first_run(before)
    return result


@final
class _Runs:
    """The first run of a body, and those that follow it.

    The user's contexts are entered here, not by torch: they must not see the preparation of a run, and with contexts
    torch refuses `debug`.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        plan: CheckpointPlan | None,
        inputs: RunInputs,
        captured: CapturedLeaves | None,
        context_fn: ContextFunction | None,
    ) -> None:
        self._body = body
        self._inputs = inputs
        self._captured = captured
        self._kept = KeptResults()
        self._contexts = (_NOTHING, _NOTHING) if context_fn is None else _pair_of(context_fn())
        #: A body that was not analysed may mutate; norms in a graph do so in training mode.
        self.may_mutate = plan is None or plan.may_mutate or inputs.has_copies
        self._saves = SavedVersions(plan) if self.may_mutate else None
        self._may_trace = plan is None or plan.may_trace
        self._has_begun = False

    def __call__(self, *saved: Tensor) -> Any:
        if self._has_begun:
            return self._run_again(saved)
        self._has_begun = True
        operands, keywords = self._inputs.first()
        with (
            _NOTHING if self._captured is None else self._captured.recording(),
            _NOTHING if self._saves is None else self._saves.first(),
            hooks_ignoring_traces() if self._may_trace else _NOTHING,
            self._kept.recording(),
            self._contexts[0],
        ):
            return run_body(_NOTHING, self._body, operands, keywords)
        raise RecomputeError("a context of the context function suppresses an exception of the body; let it propagate")

    def _run_again(self, saved: tuple[Tensor, ...]) -> Any:
        with (
            _outside_of_inference() if torch.is_inference_mode_enabled() else _NOTHING,
            variable_set(_LEVELS, _levels_now()),  # A nested checkpoint then behaves as in the first run.
            self._inputs.again(saved) as (operands, keywords),
            _NOTHING if self._captured is None else self._captured.unchanged(),
            _NOTHING if self._saves is None else self._saves.again(),
            hooks_ignoring_traces() if self._may_trace else _NOTHING,
            self._kept.replaying(),
            self._contexts[1],
        ):
            return run_body(_NOTHING, self._body, operands, keywords)


@contextmanager
def _outside_of_inference() -> Iterator[None]:
    """For a backward that is called in inference mode: the first run was outside of it."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


_NOTHING = nullcontext()


def _pair_of(contexts: Any) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    if isinstance(contexts, tuple | list) and len(contexts) == 2:
        first, second = contexts
        return first, second
    raise OptionError(
        f"context_fn returns two contexts, for the first and for the second run, not {type(contexts).__name__!r}"
    )


def _cannot_recompute() -> bool:
    """Whether nothing can be recomputed: a torch.func transform or forward-mode AD is active.

    Some transforms disable saved-tensor hooks. Of others, the levels and tangents are gone when the backward runs.
    """
    try:
        with _IdentityHooks():  # Raises where hooks are disabled.
            pass
    except RuntimeError:
        return True
    if _SAVES_BY_FUNCTION and count_levels():
        return True
    return _levels_now() != _LEVELS.get()


class _IdentityHooks(saved_tensors_hooks):
    """Hooks that save tensors as they are; a class of its own, since a capture refuses the hooks of a model."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)


def _levels_now() -> tuple[int, int]:
    """How many active torch.func transforms wrap tensors, and the level of forward-mode AD."""
    return count_levels(wrapping=True), forward_ad._current_level


#: Before torch 2.13, a checkpoint saved its arguments by an autograd function, for which no transform has a rule.
_SAVES_BY_FUNCTION = torch.__version__ < "2.13"

#: The levels around a backward that recomputes a body: the first run of the body was outside of them.
_LEVELS: ContextVar[tuple[int, int]] = ContextVar("levels around a backward", default=(0, -1))


def _device_markers(tensors: Iterable[Tensor]) -> list[Tensor]:
    """An empty tensor on each accelerator that holds one of these.

    A checkpoint only preserves the RNG state of the devices of its arguments.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    return [torch.empty(0, device=device) for device in sorted(devices, key=str)]


def _checkpoint_arguments(options: CheckpointOptions, plan: CheckpointPlan | None, body: Any) -> dict[str, Any]:
    preserves_rng = plan is None or plan.preserves_rng
    others = dict(options.others or {})
    if plan.saves_before_mutation if plan is not None else isinstance(body, nn.Module) and saves_before_mutation(body):
        others.setdefault("early_stop", False)
    return {"use_reentrant": False, "preserve_rng_state": options.preserve_rng_state and preserves_rng, **others}
