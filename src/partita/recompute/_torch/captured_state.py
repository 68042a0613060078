"""State that a body reads beside its arguments, checked and restored between its two runs.

These are captured tensors of a function (free variables, bound arguments), and parameters and buffers of modules.
Generators of its own are refused; the RNG state of devices is saved where the body runs (`run`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.operator_schemas import storage_key
from partita._torch.tensors import version_of, wants_gradients
from partita.errors import RecomputeError, listed
from partita.recompute._torch.saved_tensor_hooks import around_hooks

#: Dynamo skips the frames of this module: they run around bodies after a graph break.
DYNAMO_SKIPS = True


def refuse_unrepeatable(function: Any, arguments: Iterable[Any]) -> None:
    """Raises where a module that is no graph has a norm in training mode, or a generator is captured or passed.

    Version counters miss the updates of norms, and only the state of default generators is restored.
    """
    module = function
    while isinstance(module, partial):
        module = module.func
    if isinstance(module, nn.Module):
        refuse_mutations(BodyState(module).statistics, is_graph=False)
        for path, inner in module.named_modules():
            for key, value in vars(inner).items():
                _refuse_generator(f"{path}.{key}".strip("."), value)
    for name, value in _captured_values(function):
        _refuse_generator(name, value)
    refuse_generators(arguments)


def refuse_generators(arguments: Iterable[Any]) -> None:
    """Raises where a generator is passed to a body."""
    for place, value in enumerate(arguments):
        _refuse_generator(f"argument {place}", value)


def _refuse_generator(name: str, value: Any) -> None:
    if isinstance(value, torch.Generator):
        raise RecomputeError(
            f"the body uses its own random number generator, {name!r}, which would give other numbers when it is "
            "recomputed; use the default generator, or generate the numbers outside of the region"
        )


def captured_tensors(function: Any, arguments: Iterable[Any] = ()) -> dict[str, Tensor]:
    """The tensors that a function captures by closure or binding, and those of modules that are passed to it."""
    found: dict[str, Tensor] = {}
    modules = ((f"argument {place}", value) for place, value in enumerate(arguments) if isinstance(value, nn.Module))
    for name, value in (*_captured_values(function), *modules):
        if isinstance(value, Tensor):
            found.setdefault(name, value)
        elif isinstance(value, nn.Module):
            for table in (value.named_parameters(), value.named_buffers()):
                found.update((f"{name}.{path}", tensor) for path, tensor in table)
    return found


class CapturedLeaves:
    """Leaves that autograd saves in the first run and that are no arguments; they must be unmutated in the second.

    Plain autograd would raise if one of them were mutated. They include weights that the function captures. They are
    held weakly: results of the function that are unused elsewhere are gone by then.
    """

    def __init__(self, function: Any, arguments: Iterable[Tensor]) -> None:
        self._function = function
        self._arguments = {id(_base_of(tensor)) for tensor in arguments}
        self._seen: list[tuple[weakref.ref[Tensor], int | None]] = []
        captured = captured_tensors(function).values()
        self._flags = GradientFlags(tensor for tensor in captured if isinstance(tensor, nn.Parameter))

    def recording(self) -> AbstractContextManager[Any]:
        """The context of the first run."""
        return around_hooks(self._record)

    def unchanged(self) -> AbstractContextManager[Any]:
        """The context of the second run, which restores `requires_grad`; raises if a tensor was mutated."""
        for reference, version in self._seen:
            tensor = reference()
            if tensor is not None and version_of(tensor) != version:
                raise RecomputeError(
                    f"{self._name(tensor)} was mutated between forward and backward, so the function that reads "
                    "it would be recomputed with other values; run backward before you update what it needs"
                )
        return self._flags.restored()

    def _record(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        base = _base_of(tensor)
        if base.is_leaf and id(base) not in self._arguments:
            self._seen.append((weakref.ref(base), version_of(base)))
        return pack(tensor)

    def _name(self, tensor: Tensor) -> str:
        for name, value in captured_tensors(self._function).items():
            if value is tensor:
                return repr(name)
        return f"a tensor of shape {tuple(tensor.shape)} that is no argument"


def _base_of(tensor: Tensor) -> Tensor:
    """The base of a view, or the tensor itself: a product saves its weight transposed."""
    return tensor if tensor._base is None else tensor._base


def _captured_values(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, partial):
        yield from ((f"argument {place}", value) for place, value in enumerate(function.args))
        yield from function.keywords.items()
        if isinstance(function.func, nn.Module):
            yield "function", function.func
        yield from _captured_values(function.func)
        return
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield "self", owner
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # A variable that is not set yet.
            continue


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A parameter, buffer or attribute of a module that is a tensor."""

    name: str
    table: dict[str, Any]
    key: str
    tensor: Tensor

    def held(self) -> Any:
        return self.table.get(self.key)

    def hold(self, tensor: Any) -> None:
        self.table[self.key] = tensor


class BodyState:
    """All tensors that the modules of a body hold, and the names of buffers that its norms will update.

    The latter depend on the current flags of the norms; version counters miss some of these updates.
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
            keys = (key for key in _statistics(module) if getattr(module, key, None) is not None)
            self.statistics.extend(start + key for key in keys)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by name."""
        return {slot.name: slot.tensor for slot in self.slots}

    @contextmanager
    def training_restored(self) -> Iterator[None]:
        """Inside, the modules are in the training mode of the first run: dropout reads it."""
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
    """Tensors by name, with their version, shape and storage, to detect mutations."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._before = list(map(snapshot_of, tensors.values()))

    def changed(self) -> list[str]:
        """The names of those that were mutated."""
        if not self._before:
            return []
        now = map(snapshot_of, self.tensors.values())
        return [name for name, before, after in zip(self.tensors, self._before, now, strict=True) if before != after]

    def check(self) -> None:
        """Raises where a tensor was mutated since the forward."""
        changed = self.changed()
        if changed:
            raise RecomputeError(
                f"{listed(changed)} was mutated between forward and backward, so the region that reads it would "
                "be recomputed with other values; run backward before you update what it needs"
            )


class GradientFlags:
    """Which leaves required gradients in the first run of a body; a second run needs the same."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._flags = [(tensor, wants_gradients(tensor)) for tensor in tensors]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the leaves require gradients as in the first run."""
        other = [(tensor, flag) for tensor, flag in self._flags if wants_gradients(tensor) != flag]
        for tensor, flag in other:
            tensor.requires_grad_(flag)
        try:
            yield
        finally:
            for tensor, flag in other:
                tensor.requires_grad_(not flag)


def refuse_mutations(names: Sequence[str], *, is_graph: bool, is_planned: bool = False) -> None:
    """Raises if anything was mutated, or will be, of which there is no copy."""
    if not names:
        return
    if is_planned:
        way = (
            "the plan has no copy of that. If `wait_tensor` is in the body, put it into one region with the collective "
            "that it waits for"
        )
    elif is_graph:
        way = "recompute it by a plan, which knows what a graph mutates"
    else:
        way = "trace it into a graph, so that mutations of its arguments and buffers can be undone"
    raise RecomputeError(
        f"the body mutates {listed(names)}, and recomputing it would do so again; {way}, or leave the mutation out of "
        "the region"
    )


def snapshot_of(tensor: Tensor) -> tuple[object, ...]:
    """The version, shape and storage of a tensor, which a mutation changes."""
    return version_of(tensor), tensor.shape, storage_key(tensor)


def _statistics(module: Any) -> tuple[str, ...]:
    """The buffers that a norm updates with its current flags: any module that tracks running statistics is one."""
    tracks = getattr(module, "track_running_stats", None)
    if isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d):
        return ("running_mean", "running_var") if module.training or not tracks else ()
    return ("running_mean", "running_var", "num_batches_tracked") if module.training and tracks else ()
