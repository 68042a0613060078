"""Running a body so that autograd keeps its inputs and chosen results, and computes the rest again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from partita._torch.body_runs import run_body
from partita._torch.checkpoint_facts import BodyFacts, facts_of
from partita._torch.checkpoint_inputs import StateWatch, WrittenInputs
from partita._torch.checkpoint_keeping import KeptResults
from partita._torch.checkpoint_outside import OutsideLeaves, found_outside
from partita._torch.checkpoint_saved import SavedInputs, can_be_saved
from partita._torch.checkpoint_saves import SavesInOrder

__all__ = ["CheckpointOptions", "ContextFunction", "run_recomputed"]

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
    if not torch.is_grad_enabled() or _saves_as_always():
        return run_body(nullcontext(), body, operands, keywords)
    facts = facts_of(body)
    # What a checkpoint is given it saves.
    if (facts is not None and facts.needs_copies) or not all(
        map(can_be_saved, pytree.tree_leaves((operands, keywords)))
    ):
        return _run_writing(body, operands, keywords, options, facts or BodyFacts())
    inputs, runs = SavedInputs(operands, keywords), _Runs(options)
    watch, outside, saves = StateWatch(body), OutsideLeaves(body), SavesInOrder(facts)
    given = StateWatch({name: leaf for name, leaf in inputs.named().items() if isinstance(leaf, nn.Parameter)})
    unchanged = StateWatch({**inputs.named(), **found_outside(body)}) if facts is None else None

    def run(*tensors: Tensor) -> Any:
        if not runs.is_second:
            operands, keywords = inputs.first()
            with (
                outside.noting() if facts is None else nullcontext(),
                saves.first() if facts is None else nullcontext(),
            ):
                return run_body(nullcontext(), body, operands, keywords)
        watch.check()
        given.check()
        outside.check()
        operands, keywords = inputs.again(tensors)
        with watch.restored(), saves.second() if facts is None else nullcontext():
            return run_body(nullcontext(), body, operands, keywords)

    tensors = inputs.tensors()
    others = [*watch.tensors(), *(() if unchanged is None else unchanged.tensors())]
    with inputs.saving():
        result = checkpoint(run, *tensors, *_drawing(others), **_arguments(options, runs, facts))
    if unchanged is not None:
        watch.settle()
        unchanged.settle()
    return result


def _saves_as_always() -> bool:
    """Whether a transform of torch.func is at work that lets nobody say how tensors are saved."""
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message():
        return True
    # Before torch 2.13, a checkpoint saved its arguments by an autograd function, for which transforms have no rule.
    is_old = hasattr(torch.utils.checkpoint, "_NoopSaveInputs")
    return is_old and torch._C._functorch.peek_interpreter_stack() is not None


def _run_writing(
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    keywords: Mapping[str, Any],
    options: CheckpointOptions,
    facts: BodyFacts,
) -> Any:
    inputs, runs, saves = WrittenInputs(body, facts, operands, keywords), _Runs(options), SavesInOrder(facts)

    def run(inputs: WrittenInputs, *_: Tensor) -> Any:
        with inputs.given() as (operands, keywords), saves.second() if runs.is_second else saves.first():
            return run_body(nullcontext(), body, operands, keywords)

    result = checkpoint(run, inputs, *_drawing(inputs.tensors()), **_arguments(options, runs, facts))
    inputs.settle()
    return result


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _drawing(tensors: Iterable[Tensor]) -> list[Tensor]:
    """An empty tensor on each accelerator that holds one of these.

    A checkpoint preserves the generators of the devices on which it is given tensors, and of no others.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    return [torch.empty(0, device=device) for device in sorted(devices, key=str)]


def _arguments(options: CheckpointOptions, runs: _Runs, facts: BodyFacts | None) -> dict[str, Any]:
    may_draw = facts is None or facts.may_draw
    return {
        "use_reentrant": False,
        "preserve_rng_state": options.preserve_rng_state and may_draw,
        "context_fn": runs.contexts,
        **(options.others or {}),
    }


class _Runs:
    """The contexts of the two runs: results are kept in the first and given back in the second."""

    def __init__(self, options: CheckpointOptions) -> None:
        self._options = options
        self.is_second = False

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        kept = KeptResults()
        first, second = (
            (nullcontext(), nullcontext()) if self._options.context_fn is None else self._options.context_fn()
        )
        return _both(kept.noting(), first), self._again(kept, second)

    @contextmanager
    def _once_more(self, kept: KeptResults, theirs: AbstractContextManager[Any]) -> Iterator[None]:
        self.is_second = True
        with kept.returning(), theirs:
            yield

    def _again(self, kept: KeptResults, theirs: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        return _Reusable(lambda: self._once_more(kept, theirs))


class _Reusable(AbstractContextManager[None]):
    """A context that can be entered again, one after the other: there may be a second backward."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


@contextmanager
def _both(ours: AbstractContextManager[Any], theirs: AbstractContextManager[Any]) -> Iterator[None]:
    with ours, theirs:
        yield
