"""Checkpointed run: forward, recompute in backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch.autograd import forward_ad
from torch.fx import Node
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from partita._torch.tensors import version_of
from partita.analysis._torch.body_effects import BodyEffects, effects_of_body, saves_before_mutation
from partita.errors import OptionError, RecomputeError
from partita.hops._torch.body import run_body
from partita.hops._torch.node_tags import SAVED, next_graph_id, node_tags, saving, tagging
from partita.program._torch.saved_tensors import around_hooks, but_for_traces
from partita.recompute._torch.captured_state import (
    BodyState,
    OutsideLeaves,
    TensorWatch,
    found_outside,
    refuse_by_hand,
    refuse_generators,
)
from partita.recompute._torch.inputs import RunInputs, named_tensors
from partita.recompute._torch.keep import KeptResults
from partita.recompute._torch.traced_steps import TracedStep, run_kept_in_step, traces_whole_step

__all__ = ["CheckpointOptions", "run_kept_tagged", "run_recomputed", "run_tagged", "tag_nodes"]

#: Dynamo leaves the code of this module to Python: it runs around bodies, of which a break has ended the graph.
DYNAMO_SKIPS = True


# Recomputed bodies where a tracer writes down their operators: tags on the nodes, which a partitioner acts on.


def run_tagged(
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    keywords: Mapping[str, Any],
    *,
    context_fn: ContextFunction | None,
    saved: Collection[Node],
) -> Any:
    """What `body` gives; the nodes that are traced meanwhile say that they can be computed again, but for `saved`.

    A selective context function decides node by node. Where the backward is traced too, the body runs again there; a
    compiler sees to that itself, later.
    """
    is_saved = (node_tags() or {}).get("recompute") is CheckpointPolicy.MUST_SAVE
    if is_saved:
        return run_body(nullcontext(), body, operands, keywords)
    if not _may_train(body, operands, keywords):
        with saving(saved):  # Others may train on what the body has written.
            return run_body(nullcontext(), body, operands, keywords)
    first, again = (None, None) if context_fn is None else context_fn()
    number = next_graph_id()
    run: Callable[[], Any] = partial(run_body, nullcontext(), body, operands, keywords)
    if traces_whole_step() and not saves_as_always():
        run = TracedStep(body, operands, keywords, again).first
    if first is None:
        with tagging({"ac_graph_id": number, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}), saving(saved):
            return run()
    if hasattr(first, "ac_graph_id"):
        first.ac_graph_id = number
    with tagging({"ac_graph_id": number}), first:
        return run()


def _may_train(body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Whether autograd may save anything: a compiler refuses what draws and is tagged, in graphs without a backward."""
    state = body.parameters() if isinstance(body, nn.Module) else ()
    given = (*tree_leaves((operands, dict(keywords))), *state)
    return torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given)


def run_kept_tagged(body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """What `body` gives; where nodes are tagged, these say that they are saved."""
    is_recomputed = bool(node_tags())
    with tagging(SAVED) if is_recomputed else nullcontext():
        return run_kept_in_step(partial(run_body, nullcontext(), body, operands, keywords))


def tag_nodes(gmod: Any, is_sac: bool) -> Any:  # noqa: FBT001  The signature is torch's.
    """Tags every call of a graph, in place: a selective policy decides later what is recomputed, or all of it is."""
    number = next_graph_id()
    for node in gmod.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            node.meta["ac_graph_id"] = number
            node.meta["recompute"] = None if is_sac else CheckpointPolicy.PREFER_RECOMPUTE
    return gmod


# Running a body so that autograd keeps its inputs and chosen results, and computes the rest again in the backward.


#: Gives the contexts of the first and of the second run.
ContextFunction = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """How `torch.utils.checkpoint` is called, as far as the caller said."""

    preserve_rng_state: bool = True
    context_fn: ContextFunction | None = None
    #: `determinism_check`, `debug` and `early_stop` where they were given.
    others: Mapping[str, Any] | None = None


def run_recomputed(
    body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any], options: CheckpointOptions
) -> Any:
    """What `body` gives; its intermediate results are computed again when the backward needs them."""
    if not torch.is_grad_enabled() or saves_as_always():
        return run_body(nullcontext(), body, operands, keywords)
    facts, state = effects_of_body(body), BodyState(body)
    arguments = named_tensors(operands, keywords)
    tensors = {**arguments, **state.tensors()}
    if facts is None:
        given = (*operands, *keywords.values())
        refuse_by_hand(body, given)
        tensors |= found_outside(body, given)
    else:
        refuse_generators(operands)
    inputs = RunInputs(state, facts, operands, keywords)
    outside = None if facts is not None else OutsideLeaves(body, arguments.values())
    runs = _Runs(body, facts, inputs, outside, options.context_fn)
    before = TensorWatch(tensors) if runs.may_write else None
    result = checkpoint(runs, *inputs.hand_over(), *_drawing(tensors.values()), **_arguments(options, facts, body))
    if before is not None:
        inputs.settle(before)
    return result


@final
class _Runs:
    """The first run of a body, and those that follow it.

    Contexts are entered here, not by torch: what prepares a run is none of their business, and with contexts torch
    refuses to debug.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        facts: BodyEffects | None,
        inputs: RunInputs,
        outside: OutsideLeaves | None,
        context_fn: ContextFunction | None,
    ) -> None:
        self._body = body
        self._inputs = inputs
        self._outside = outside
        self._kept = KeptResults()
        self._theirs = (_NOTHING, _NOTHING) if context_fn is None else _pair_of(context_fn())
        #: A body that nobody has looked into may write; norms in a graph do so once they are set to training.
        self.may_write = facts is None or facts.needs_copies or inputs.has_copies
        self._saves = SavesInOrder(facts) if self.may_write else None
        self._may_trace = facts is None or facts.may_trace
        self._has_begun = False

    def __call__(self, *saved: Tensor) -> Any:
        if self._has_begun:
            return self._run_again(saved)
        self._has_begun = True
        operands, keywords = self._inputs.first()
        with (
            _NOTHING if self._outside is None else self._outside.noting(),
            _NOTHING if self._saves is None else self._saves.first(),
            but_for_traces() if self._may_trace else _NOTHING,
            self._kept.noting(),
            self._theirs[0],
        ):
            return run_body(_NOTHING, self._body, operands, keywords)
        raise RecomputeError("a context of the context function swallows what the body raises; let it raise")

    def _run_again(self, saved: tuple[Tensor, ...]) -> Any:
        with (
            _levels_of_backward(),
            self._inputs.again(saved) as (operands, keywords),
            _NOTHING if self._outside is None else self._outside.unchanged(),
            _NOTHING if self._saves is None else self._saves.again(),
            but_for_traces() if self._may_trace else _NOTHING,
            self._kept.returning(),
            self._theirs[1],
        ):
            return run_body(_NOTHING, self._body, operands, keywords)


_NOTHING = nullcontext()


def _pair_of(contexts: Any) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    if isinstance(contexts, tuple | list) and len(contexts) == 2:
        first, second = contexts
        return first, second
    raise OptionError(
        f"context_fn gives two contexts, for the first and for the second run, not {type(contexts).__name__!r}"
    )


def saves_as_always() -> bool:
    """Whether nothing can be computed again: a transform of torch.func or forward-mode AD is at work.

    Some let nobody say how tensors are saved. Of others, the levels and tangents are gone when the backward runs.
    """
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message():
        return True
    # Before torch 2.13, a checkpoint saved its arguments by an autograd function, for which no transform has a rule.
    if hasattr(torch.utils.checkpoint, "_NoopSaveInputs") and torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return _levels_now() != _LEVELS.get()


def _levels_now() -> tuple[int, int]:
    """How many transforms of torch.func are at work that wrap tensors, and the level of forward-mode AD."""
    stack = () if torch._C._functorch.peek_interpreter_stack() is None else torch._C._functorch.get_interpreter_stack()
    wrapping = [level for level in stack or () if level.key() != TransformType.Functionalize]
    return len(wrapping), forward_ad._current_level


#: The levels around a backward that computes a body again: they are not the body's own, which ran without them.
_LEVELS: ContextVar[tuple[int, int]] = ContextVar("levels around a backward", default=(0, -1))


@contextmanager
def _levels_of_backward() -> Iterator[None]:
    """Inside, a checkpoint in a body that runs again goes on as in the first run."""
    token = _LEVELS.set(_levels_now())
    try:
        yield
    finally:
        _LEVELS.reset(token)


def _drawing(tensors: Iterable[Tensor]) -> list[Tensor]:
    """An empty tensor on each accelerator that holds one of these.

    A checkpoint preserves the generators of the devices on which it is given tensors, and of no others.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    return [torch.empty(0, device=device) for device in sorted(devices, key=str)]


def _arguments(options: CheckpointOptions, facts: BodyEffects | None, body: Any) -> dict[str, Any]:
    may_use_rng = facts is None or facts.may_use_rng
    others = dict(options.others or {})
    if (
        facts.saves_before_mutation
        if facts is not None
        else isinstance(body, nn.Module) and saves_before_mutation(body)
    ):
        others.setdefault("early_stop", False)
    return {"use_reentrant": False, "preserve_rng_state": options.preserve_rng_state and may_use_rng, **others}


# What autograd saves of a body that writes: refused where it is needed and was written since, as plain autograd does.
#
# A checkpoint keeps what the second run saves without looking. It is told apart by its order, the same in both runs.


class SavesInOrder:
    """How often each tensor that a body saves had been written when the second run saved it."""

    def __init__(self, facts: BodyEffects | None) -> None:
        self._facts = facts
        self._count = 0
        self._versions: list[int | None] = []

    def first(self) -> AbstractContextManager[Any]:
        """While the body runs for the first time."""
        return around_hooks(self._number, self._checked)

    def again(self) -> AbstractContextManager[Any]:
        """While it runs again."""
        self._versions = []
        return around_hooks(self._note)

    def _number(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> tuple[int, Any]:
        self._count += 1
        return self._count - 1, pack(tensor)

    def _note(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        self._versions.append(version_of(tensor))
        return pack(tensor)

    def _checked(self, unpack: Callable[[Any], Tensor], numbered: tuple[int, Any]) -> Tensor:
        place, packed = numbered
        tensor = unpack(packed)  # The first of these runs the body again.
        if self._versions[place : place + 1] in ([], [version_of(tensor)]):
            return tensor
        who = "the body" if self._facts is None else f"one of the nodes {', '.join(self._facts.writers[:5])}"
        raise RecomputeError(
            f"{who} writes to a tensor that the backward needs as it was; plain autograd refuses that too"
        )
