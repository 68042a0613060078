"""Running a body so that autograd keeps its inputs and chosen results, and computes the rest again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partita._torch.body_runs import run_body
from partita._torch.checkpoint_arguments import RunInputs, named_tensors
from partita._torch.checkpoint_facts import BodyFacts, facts_of, saves_too_soon
from partita._torch.checkpoint_keeping import KeptResults
from partita._torch.checkpoint_outside import OutsideLeaves, found_outside, refuse_by_hand, refuse_generators
from partita._torch.checkpoint_state import BodyState, TensorWatch
from partita._torch.saves_checked import SavesInOrder
from partita._torch.saving_hooks import but_for_traces
from partita.errors import OptionError, RecomputeError

__all__ = ["CheckpointOptions", "ContextFunction", "run_recomputed", "saves_as_always"]

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
    facts, state = facts_of(body), BodyState(body)
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
        facts: BodyFacts | None,
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
    """Whether a transform of torch.func is at work that lets nobody say how tensors are saved."""
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message():
        return True
    # Before torch 2.13, a checkpoint saved its arguments by an autograd function, for which transforms have no rule.
    is_old = hasattr(torch.utils.checkpoint, "_NoopSaveInputs")
    return is_old and torch._C._functorch.peek_interpreter_stack() is not None


def _drawing(tensors: Iterable[Tensor]) -> list[Tensor]:
    """An empty tensor on each accelerator that holds one of these.

    A checkpoint preserves the generators of the devices on which it is given tensors, and of no others.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    return [torch.empty(0, device=device) for device in sorted(devices, key=str)]


def _arguments(options: CheckpointOptions, facts: BodyFacts | None, body: Any) -> dict[str, Any]:
    may_draw = facts is None or facts.may_draw
    others = dict(options.others or {})
    if facts.saves_too_soon if facts is not None else isinstance(body, nn.Module) and saves_too_soon(body):
        others.setdefault("early_stop", False)
    return {"use_reentrant": False, "preserve_rng_state": options.preserve_rng_state and may_draw, **others}
