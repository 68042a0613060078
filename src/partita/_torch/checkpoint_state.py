"""The tensors that the modules of a body hold: watched between its runs, and put back for the second one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from partita._torch.schemas import storage_key
from partita._torch.storage_copies import wants_gradients
from partita._torch.versions import version_of
from partita.errors import RecomputeError

__all__ = ["BodyState", "GradientFlags", "Slot", "TensorWatch", "condition_of", "holding", "listed", "refuse_writes"]


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Where a module of a body holds a tensor."""

    name: str
    table: dict[str, Any]
    key: str
    tensor: Tensor

    def held(self) -> Any:
        return self.table.get(self.key)

    def hold(self, tensor: Any) -> None:
        self.table[self.key] = tensor


class BodyState:
    """All places in the modules of a body that hold a tensor, and the names of buffers that its norms will write.

    Which these are depends on how the norms are set now; torch does not count all of these writes.
    """

    def __init__(self, body: Any) -> None:
        self.slots: list[Slot] = []
        self.statistics: list[str] = []
        self._training: list[tuple[nn.Module, bool]] = []
        for path, module in body.named_modules() if isinstance(body, nn.Module) else ():
            start = f"{path}." if path else ""
            self._training.append((module, module.training))
            for table in (module._parameters, module._buffers, vars(module)):
                for key, tensor in table.items():
                    if isinstance(tensor, Tensor):
                        self.slots.append(Slot(start + key, table, key, tensor))
            if isinstance(module, _NORMS):
                held = (key for key in _statistics(module) if getattr(module, key) is not None)
                self.statistics.extend(start + key for key in held)

    def tensors(self) -> dict[str, Tensor]:
        """What is held, by name."""
        return {slot.name: slot.tensor for slot in self.slots}

    @contextmanager
    def training_restored(self) -> Iterator[None]:
        """Inside, the modules are in training or not as they were: dropout knows no other way."""
        other = [module for module, was_training in self._training if module.training != was_training]
        for module in other:
            module.training = not module.training
        try:
            yield
        finally:
            for module in other:
                module.training = not module.training


@contextmanager
def holding(tensors: Mapping[Slot, Tensor]) -> Iterator[None]:
    """Inside, the slots hold these tensors."""
    before = {slot: slot.held() for slot in tensors}
    for slot, tensor in tensors.items():
        slot.hold(tensor)
    try:
        yield
    finally:
        for slot, tensor in before.items():
            slot.hold(tensor)


class TensorWatch:
    """Tensors by name, which are looked at again later."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._before = list(map(condition_of, tensors.values()))

    def changed(self) -> list[str]:
        """The names of those that are not what they were."""
        if not self._before:
            return []
        now = map(condition_of, self.tensors.values())
        return [name for name, before, after in zip(self.tensors, self._before, now, strict=True) if before != after]

    def check(self) -> None:
        """Raises where a tensor that must stay as it is has changed since the forward."""
        changed = self.changed()
        if changed:
            raise RecomputeError(
                f"{listed(changed)} changed in place between forward and backward, so the region that reads it would "
                "be recomputed with other values; run backward before you update what it needs"
            )


class GradientFlags:
    """Which leaves wanted gradients when a body ran first; a second run needs the same, whatever was set since."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._flags = [(tensor, wanted) for tensor in tensors for wanted in [wants_gradients(tensor)]]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the leaves want gradients if they did."""
        other = [(tensor, flag) for tensor, flag in self._flags if wants_gradients(tensor) != flag]
        for tensor, flag in other:
            tensor.requires_grad_(flag)
        try:
            yield
        finally:
            for tensor, flag in other:
                tensor.requires_grad_(not flag)


def refuse_writes(names: Sequence[str], *, is_graph: bool, is_planned: bool = False) -> None:
    """Raises if anything was written, or will be, of which there is no copy."""
    if not names:
        return
    if is_planned:
        way = (
            "the plan has no copy of that. If `wait_tensor` is in the body, put it into one region with the collective "
            "that it waits for"
        )
    elif is_graph:
        way = "recompute it by a plan, which knows what a graph writes"
    else:
        way = "trace it into a graph, so that writes to what it is given and to its buffers can be undone"
    raise RecomputeError(
        f"the body writes to {listed(names)}, which recomputing it would do again; {way}, or leave what writes out of "
        "the region"
    )


def listed(names: Sequence[str]) -> str:
    """The first of these names, and how many there are beside."""
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def condition_of(tensor: Tensor) -> tuple[object, ...]:
    """What tells whether a tensor is what it was: how often it has been written, its shape, its memory."""
    return version_of(tensor), tensor.shape, storage_key(tensor)


def _statistics(module: Any) -> tuple[str, ...]:
    """The buffers that a norm writes, as its flags are now."""
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return ("running_mean", "running_var") if module.training or not module.track_running_stats else ()
    writes = module.training and module.track_running_stats
    return ("running_mean", "running_var", "num_batches_tracked") if writes else ()


_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
