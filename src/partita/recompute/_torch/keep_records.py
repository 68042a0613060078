"""What is recorded of the operators of a kept segment: results, mutations, RNG states, and casts by autocast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from partita._torch.operator_schemas import is_of_other_library, signatures_of, storage_key
from partita._torch.pytrees import leaves_of, tensors_in
from partita._torch.tensors import version_of
from partita.errors import RecomputeError
from partita.program._torch.saved_tensors import is_differentiable_cast, is_inside_autocast
from partita.recompute._torch.inputs import is_trained

#: Dynamo skips the frames of this module: they run around bodies after a graph break.
DYNAMO_SKIPS = True


@final
class AutocastCasts:
    """The casts of a segment that autocast may have inserted, each for the operator that comes next.

    Autocast caches some casts, which then occur in one run only, so casts are recomputed. The exceptions are the last
    operator of a segment, and casts of tensors that the segment mutates afterwards: these are kept.
    """

    def __init__(self) -> None:
        #: By the storage that they read, with a function that makes them.
        self._casts: defaultdict[int, list[tuple[OperatorRecord, Callable[[], Tensor]]]] = defaultdict(list)
        self._last: OperatorRecord | None = None

    def add(self, record: OperatorRecord, source: Tensor, make: Callable[[], Tensor]) -> None:
        """Adds a cast of `source`."""
        self._casts[storage_key(source)].append((record, make))
        self._last = record

    def before_mutation(self, mutated: Iterable[Tensor]) -> None:
        """Keeps the casts of tensors that are about to be mutated."""
        for storage in {storage_key(tensor) for tensor in mutated}.intersection(self._casts):
            for record, make in self._casts.pop(storage):
                record.keep(make())
                self._last = None if record is self._last else self._last

    def next_operator(self) -> None:
        """Releases the last cast, since another operator has run."""
        if self._last is not None:
            self._last.release()
            self._last = None


def may_be_autocast(cast: Cast | None) -> bool:
    """Whether autocast may have inserted a cast."""
    return cast is not None and is_inside_autocast()


def was_cached(cast: Cast | None, record: OperatorRecord | None) -> bool:
    """Whether a cast did not run in the first run, where `record` was the next: autocast caches those of leaves."""
    if cast is None:
        return False
    return record is None or record.cast is None or (cast is Cast.OF_LEAF and record.cast is Cast.OF_RESULT)


@final
class RngStates:
    """The states of the default generators before and after a kept segment, by device.

    Operators that are not run again must still advance the generators. Only devices whose state has changed are here:
    attention without dropout changes none.
    """

    __slots__ = ("_after", "_before")

    def __init__(self) -> None:
        self._before: dict[torch.device, Tensor] = {}
        self._after: dict[torch.device, Tensor] = {}

    def recorded(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator of the first run."""
        if not may_use_rng(operator):
            return operator(*args, **kwargs)
        before = _states(_devices(args, kwargs))
        result = operator(*args, **kwargs)
        after = _states(before)
        for device in before:
            if not _are_equal(before[device], after[device]):
                self._before.setdefault(device, before[device])
                self._after[device] = after[device]
        return result

    def devices(self) -> Iterable[torch.device]:
        """Where the segment has advanced the RNG state."""
        return self._before

    def rewind(self) -> None:
        """Sets the state from before the segment, which is recomputed next."""
        _set_states(self._before)

    def skip(self) -> None:
        """Sets the state from after the segment."""
        _set_states(self._after)


@contextmanager
def rng_state_restored(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restores the RNG states of these devices at the end."""
    before = _states(devices)
    try:
        yield
    finally:
        _set_states(before)


@cache
def may_use_rng(operator: Any) -> bool:
    """Whether an operator may use a default generator; custom and higher-order operators need not declare it."""
    signatures = signatures_of(operator)
    return not signatures or any(one.uses_rng or is_of_other_library(one) for one in signatures)


def _devices(args: Any, kwargs: Any) -> list[torch.device]:
    leaves = leaves_of((args, kwargs))
    found = [leaf.device if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    devices = [torch.device("cpu"), *(device for device in found if isinstance(device, torch.device))]
    return [device for device in dict.fromkeys(devices) if _has_generator(device)]


def _states(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    return {device: _module_of(device).get_rng_state(*_index_of(device)) for device in devices}


def _set_states(states: Mapping[torch.device, Tensor]) -> None:
    for device, state in states.items():
        _module_of(device).set_rng_state(state, *_index_of(device))


def _are_equal(one: Tensor, other: Tensor) -> bool:
    with _disable_current_modes():  # States are real, whatever the tensors of the body are.
        return torch.equal(one, other)


def _has_generator(device: torch.device) -> bool:
    return device.type != "meta" and hasattr(_module_of(device), "get_rng_state")


def _module_of(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _index_of(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type in ("cpu", "mps") else (device,)


@final
class MutationCopies:
    """Copies of what the operators of a segment have mutated, as it was after each of them.

    Results that are kept need no copies. Of memory that is mutated repeatedly the last copy suffices, unless a
    recomputed operator reads it in between.
    """

    def __init__(self) -> None:
        self._kept: set[int] = set()
        #: The record of the last copy and its position there, by storage and layout of the mutated tensor.
        self._last: dict[tuple[object, ...], tuple[OperatorRecord, int]] = {}

    def of(self, mutated: Sequence[Tensor]) -> list[Tensor | None]:
        """Copies of what an operator has just mutated, None for memory that is kept."""
        return [None if storage_key(tensor) in self._kept else tensor.clone() for tensor in mutated]

    def add(self, record: OperatorRecord, mutated: Sequence[Tensor]) -> None:
        """Adds the copies in a record, and drops older ones of the same memory."""
        for place, tensor in enumerate(mutated):
            if record.mutated[place] is None or tensor.layout is not torch.strided:
                continue
            key = (storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if key in self._last:
                older, its_place = self._last[key]
                older.mutated[its_place] = None
            self._last[key] = (record, place)

    def add_kept(self, record: OperatorRecord) -> None:
        """Adds a record whose results are kept, with later mutations of them."""
        self._kept.update(map(storage_key, tensors_in(record.result)))

    def add_reader(self) -> None:
        """Adds an operator that is recomputed and may read what was mutated."""
        self._last.clear()


class Cast(Enum):
    """The casts that autocast inserts for tensors that require gradients: it caches those of leaves."""

    OF_LEAF = auto()
    OF_RESULT = auto()


@final
class OperatorRecord:
    """The results of an operator, their versions at the end of the kept segment, and copies of what it mutated."""

    __slots__ = ("cast", "is_recomputed", "mutated", "operator", "result", "versions")

    def __init__(self, operator: Any, args: Any, result: Any, mutated: Sequence[Tensor | None]) -> None:
        self.operator = operator
        count = _returned_arguments(operator)
        if isinstance(result, Tensor):
            self.result: Any = None if count else _without_history(result)
        else:
            leaves, structure = pytree.tree_flatten(result)
            leaves[:count] = [None] * count
            kept = [_without_history(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self.result = structure.unflatten(kept)
        #: Copies of what it mutated, None where that is kept anyway or mutated once more.
        self.mutated = list(mutated)
        self.versions: list[int | None] = []
        self.cast = cast_by(operator, args)
        #: Whether the operator is recomputed, so that this is only a placeholder.
        self.is_recomputed = False

    def close(self) -> None:
        """Takes the versions at the end of the kept segment: mutations so far belong to it."""
        self.versions = [version_of(leaf) for leaf in tensors_in(self.result)]

    def release(self) -> None:
        """Releases the result: the operator is recomputed."""
        self.is_recomputed, self.result = True, None

    def keep(self, result: Tensor) -> None:
        """Keeps a result after all."""
        self.is_recomputed, self.result = False, _without_history(result)

    def replay(self, mutated: Sequence[Tensor]) -> Any:
        """The results of the operator; mutates `mutated`, its arguments in this run, as it did."""
        if self.versions != [version_of(leaf) for leaf in tensors_in(self.result)]:
            raise RecomputeError(
                f"a result of {self.operator} was kept for the backward and then mutated, so it cannot be used "
                "again; keep something else, or mutate a copy"
            )
        for tensor, value in zip(mutated, self.mutated, strict=True):
            if value is not None:
                tensor.copy_(value)
        # A new tensor each time: autograd sets the history of a result in place.
        if isinstance(self.result, Tensor):
            return self.result.detach()
        leaves, structure = pytree.tree_flatten(self.result)
        found = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        count = _returned_arguments(self.operator)
        found[:count] = mutated[:count]
        return structure.unflatten(found)


@cache
def allocates_result(func: Any) -> bool:
    """Whether an operator allocates its result, which can then be kept.

    Views are recomputed, since keeping one would keep its base, and so are in-place changes of shape (`t_`): the tensor
    that replaces a kept result has the shape from before.
    """
    if func in _NOT_KEPT or torch.Tag.inplace_view in getattr(func, "tags", ()):
        return False
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return not any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def cast_by(func: Any, args: Any) -> Cast | None:
    """Which cast an operator is; None for other operators, and where no gradients are required."""
    if not is_differentiable_cast(func, args):
        return None
    return Cast.OF_LEAF if is_trained(args[0]) else Cast.OF_RESULT


def mutated_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator mutates according to its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    mutated = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_in(mutated)


def _without_history(tensor: Tensor) -> Tensor:
    """An alias with a shared version counter, which has to be requested explicitly below autograd."""
    if tensor.is_inference():
        return tensor.detach()
    with torch._C._SetExcludeDispatchKeyGuard(torch.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


@cache
def _returned_arguments(func: Any) -> int:
    """How many of the first results of an operator are the arguments that it mutates."""
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return sum(result.alias_info is not None and result.alias_info.is_write for result in returns)


#: Operators that autograd and its hooks call in addition to those of a body, not equally often in each run.
_NOT_KEPT: frozenset[Any] = frozenset(getattr(checkpoint, "SAC_IGNORED_OPS", ())) | {torch.ops.aten.detach.default}
