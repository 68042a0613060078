"""What autograd saves while a body runs: hooks around the active ones, and the versions of what is saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from partita._torch.modes import Tracing, tracing_now
from partita._torch.stacks import Pack, Unpack, active_saved_tensor_hooks
from partita._torch.tensors import version_of
from partita.errors import RecomputeError
from partita.recompute._torch.checkpoint_plan import CheckpointPlan

#: Dynamo skips the frames of this module: they run around bodies after a graph break.
DYNAMO_SKIPS = True


def around_hooks(
    pack: Callable[[Pack, Tensor], Any], unpack: Callable[[Unpack, Any], Tensor] | None = None
) -> AbstractContextManager[Any]:
    """Inside, `pack` and `unpack` replace the active hooks, if any, and get them as their first argument."""
    hooks = active_saved_tensor_hooks()
    if hooks is None:
        return nullcontext()
    return saved_tensors_hooks(partial(pack, hooks[0]), hooks[1] if unpack is None else partial(unpack, hooks[1]))


def hooks_ignoring_traces() -> AbstractContextManager[Any]:
    """Inside, the active hooks ignore what an operator traces when it is called, as `scan` does (torch 2.13).

    It traces its body with its backward, and a checkpoint would recompute the whole region during the trace.
    """
    return around_hooks(_pack_unless_tracing, _unpack_unless_traced)


class _TracedTensor:
    """A fake tensor that is saved during a trace."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _pack_unless_tracing(pack: Pack, tensor: Tensor) -> Any:
    return pack(tensor) if tracing_now() is Tracing.NOT else _TracedTensor(tensor)


def _unpack_unless_traced(unpack: Unpack, packed: Any) -> Tensor:
    return packed.tensor if isinstance(packed, _TracedTensor) else unpack(packed)


class SavedVersions:
    """The version counters of the tensors that a body saves, when the second run saved them.

    A tensor that was mutated since is refused, as by plain autograd; torch's checkpoint does not check what the second
    run saves. Tensors are matched by their order, which is the same in both runs.
    """

    def __init__(self, plan: CheckpointPlan | None) -> None:
        self._plan = plan
        self._count = 0
        self._versions: list[int | None] = []

    def first(self) -> AbstractContextManager[Any]:
        """While the body runs for the first time."""
        return around_hooks(self._number, self._checked)

    def again(self) -> AbstractContextManager[Any]:
        """While it runs again."""
        self._versions = []
        return around_hooks(self._record)

    def _number(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> tuple[int, Any]:
        self._count += 1
        return self._count - 1, pack(tensor)

    def _record(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        self._versions.append(version_of(tensor))
        return pack(tensor)

    def _checked(self, unpack: Callable[[Any], Tensor], numbered: tuple[int, Any]) -> Tensor:
        place, packed = numbered
        tensor = unpack(packed)  # The first of these recomputes the body.
        if self._versions[place : place + 1] in ([], [version_of(tensor)]):
            return tensor
        mutator = "the body" if self._plan is None else f"one of the nodes {', '.join(self._plan.mutating[:5])}"
        raise RecomputeError(
            f"{mutator} mutates a tensor that the backward needs as it was; plain autograd refuses that too"
        )
