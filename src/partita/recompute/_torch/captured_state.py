"""Module state and free variables between the two runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.operators.schemas import storage_key
from partita._torch.tensors import version_of, wants_gradients
from partita.errors import RecomputeError
from partita.program._torch.saved_tensors import around_hooks

__all__ = [
    "BodyState",
    "GradientFlags",
    "OutsideLeaves",
    "TensorWatch",
    "condition_of",
    "found_outside",
    "holding",
    "listed",
    "refuse_by_hand",
    "refuse_generators",
    "refuse_writes",
]

#: Dynamo leaves the code of this module to Python: it runs around bodies, of which a break has ended the graph.
DYNAMO_SKIPS = True


# What a function reaches without being given it: tensors that it closes over, modules with theirs, generators.


def refuse_by_hand(function: Any, arguments: Iterable[Any]) -> None:
    """Raises where a module that runs as a whole has a norm in training, or anything is given a generator of its own.

    torch does not count what norms write, and only the default generators are put back.
    """
    module = function
    while isinstance(module, partial):
        module = module.func
    if isinstance(module, nn.Module):
        refuse_writes(BodyState(module).statistics, is_graph=False)
        for path, inner in module.named_modules():
            for key, held in vars(inner).items():
                _refuse_generator(f"{path}.{key}".strip("."), held)
    for name, value in _closed_over(function):
        _refuse_generator(name, value)
    refuse_generators(arguments)


def refuse_generators(arguments: Iterable[Any]) -> None:
    """Raises where a body is given a generator."""
    for place, given in enumerate(arguments):
        _refuse_generator(f"argument {place}", given)


def _refuse_generator(name: str, value: Any) -> None:
    if isinstance(value, torch.Generator):
        raise RecomputeError(
            f"the body draws from a generator of its own, {name!r}, which would draw other numbers when it is "
            "recomputed; draw from the default generator, or outside of the region"
        )


def found_outside(function: Any, arguments: Iterable[Any] = ()) -> dict[str, Tensor]:
    """The tensors that a function reaches by what it closes over, is bound to, or finds in modules that it is given."""
    found: dict[str, Tensor] = {}
    modules = ((f"argument {place}", given) for place, given in enumerate(arguments) if isinstance(given, nn.Module))
    for name, value in (*_closed_over(function), *modules):
        if isinstance(value, Tensor):
            found.setdefault(name, value)
        elif isinstance(value, nn.Module):
            for table in (value.named_parameters(), value.named_buffers()):
                found.update((f"{name}.{path}", tensor) for path, tensor in table)
    return found


class OutsideLeaves:
    """The tensors without history that autograd wanted to save in the first run, which must be the same in the second.

    Autograd itself would notice if one of them were written. Weights of which the function has not been told are among
    them; results of the function that nobody else holds are not there any more when it is asked.
    """

    def __init__(self, function: Any, arguments: Iterable[Tensor]) -> None:
        self._function = function
        self._arguments = {id(_whole(tensor)) for tensor in arguments}
        self._seen: list[tuple[weakref.ref[Tensor], int | None]] = []
        reached = found_outside(function).values()
        self._flags = GradientFlags(tensor for tensor in reached if isinstance(tensor, nn.Parameter))

    def noting(self) -> AbstractContextManager[Any]:
        """While the first run lasts."""
        return around_hooks(self._note)

    def unchanged(self) -> AbstractContextManager[Any]:
        """While the second run lasts: what the function reaches wants gradients if it did; raises if it was written."""
        for told, version in self._seen:
            tensor = told()
            if tensor is not None and version_of(tensor) != version:
                raise RecomputeError(
                    f"{self._name(tensor)} changed in place between forward and backward, so the function that reads "
                    "it would be recomputed with other values; run backward before you update what it needs"
                )
        return self._flags.restored()

    def _note(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        whole = _whole(tensor)
        if whole.is_leaf and id(whole) not in self._arguments:
            self._seen.append((weakref.ref(whole), version_of(whole)))
        return pack(tensor)

    def _name(self, tensor: Tensor) -> str:
        for name, value in found_outside(self._function).items():
            if value is tensor:
                return repr(name)
        return f"a tensor of shape {tuple(tensor.shape)} that is no argument"


def _whole(tensor: Tensor) -> Tensor:
    """What a tensor is a view of: a product saves its weight transposed."""
    return tensor if tensor._base is None else tensor._base


def _closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, partial):
        yield from ((f"argument {place}", value) for place, value in enumerate(function.args))
        yield from function.keywords.items()
        if isinstance(function.func, nn.Module):
            yield "function", function.func
        yield from _closed_over(function.func)
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


# The tensors that the modules of a body hold: watched between its runs, and put back for the second one.


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
