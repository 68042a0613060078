"""One kept operator: results, writes, RNG state, casts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._mode_utils import no_dispatch

from partita._torch.operators.schemas import storage_key
from partita._torch.tensors import version_of
from partita.errors import RecomputeError
from partita.recompute._torch.inputs import is_trained

__all__ = [
    "AutocastCasts",
    "KeptDraws",
    "OperatorRecord",
    "WriteCopies",
    "allocates_result",
    "cast_by",
    "generators_put_back",
    "may_be_autocast",
    "tensors_in",
    "was_remembered",
    "written_by",
]

#: Dynamo leaves the code of this module to Python: it runs around bodies, of which a break has ended the graph.
DYNAMO_SKIPS = True


# Casts in a kept part: autocast remembers some, so that one run only has them; what it casts is cast again.


@final
class AutocastCasts:
    """The casts of a part that autocast may have made, each for the operator that comes next.

    So the last operator of a part is kept. So is a cast of what the part writes to afterwards: it could not be made
    again from what is there in the end.
    """

    def __init__(self) -> None:
        #: By the storage that they read, with a way to make them.
        self._made: defaultdict[int, list[tuple[OperatorRecord, Callable[[], Tensor]]]] = defaultdict(list)
        self._last: OperatorRecord | None = None

    def note(self, entry: OperatorRecord, source: Tensor, make: Callable[[], Tensor]) -> None:
        """A cast of `source` has been made."""
        self._made[storage_key(source)].append((entry, make))
        self._last = entry

    def before_writes(self, written: Iterable[Tensor]) -> None:
        """Somebody is going to write."""
        for storage in {storage_key(tensor) for tensor in written}.intersection(self._made):
            for entry, make in self._made.pop(storage):
                entry.keep(make())
                self._last = None if entry is self._last else self._last

    def next_operator(self) -> None:
        """Another operator has run."""
        if self._last is not None:
            self._last.let_go()
            self._last = None


def may_be_autocast(cast: Cast | None) -> bool:
    """Whether autocast may have made a cast; whether it is switched on cannot be seen below autograd."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0 and cast is not None


def was_remembered(cast: Cast | None, entry: OperatorRecord | None) -> bool:
    """Whether a cast was not made in the first run, where `entry` was the next: autocast remembers those of leaves."""
    if cast is None:
        return False
    return entry is None or entry.cast is None or (cast is Cast.OF_LEAF and entry.cast is Cast.OF_RESULT)


# The random state around what is kept: a draw that is not made again moves it, and a backward moves it for nobody.


@final
class KeptDraws:
    """The states of the default generators before the first and after the last draw of a kept part, by device.

    What only may draw, such as attention without dropout, leaves nothing here.
    """

    __slots__ = ("_after", "_before")

    def __init__(self) -> None:
        self._before: dict[torch.device, Tensor] = {}
        self._after: dict[torch.device, Tensor] = {}

    def noted(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives that runs for the first time."""
        if not _may_draw(operator):
            return operator(*args, **kwargs)
        before = _states(_devices(args, kwargs))
        result = operator(*args, **kwargs)
        after = _states(before)
        for device in before:
            if not _same(before[device], after[device]):
                self._before.setdefault(device, before[device])
                self._after[device] = after[device]
        return result

    def devices(self) -> Iterable[torch.device]:
        """Where the part has drawn."""
        return self._before

    def make_again(self) -> None:
        """What is drawn next is what the part has drawn."""
        _set(self._before)

    def pass_over(self) -> None:
        """What is drawn next is what was drawn after the part."""
        _set(self._after)


@contextmanager
def generators_put_back(devices: Iterable[torch.device]) -> Iterator[None]:
    """Whatever is drawn or set meanwhile, the generators of these devices go on as if nothing had been."""
    before = _states(devices)
    try:
        yield
    finally:
        _set(before)


@cache
def _may_draw(operator: Any) -> bool:
    """Whether an operator may move a default generator; one of somebody else's, or one with a body, need not say so."""
    if not isinstance(operator, OpOverload) or operator.namespace not in ("aten", "prims"):
        return True
    return torch.Tag.nondeterministic_seeded in operator.tags


def _devices(args: Any, kwargs: Any) -> list[torch.device]:
    leaves = pytree.tree_leaves((args, kwargs))
    found = [leaf.device if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    devices = [torch.device("cpu"), *(device for device in found if isinstance(device, torch.device))]
    return [device for device in dict.fromkeys(devices) if _has_generator(device)]


def _states(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    return {device: _module_of(device).get_rng_state(*_index_of(device)) for device in devices}


def _set(states: Mapping[torch.device, Tensor]) -> None:
    for device, state in states.items():
        _module_of(device).set_rng_state(state, *_index_of(device))


def _same(one: Tensor, other: Tensor) -> bool:
    with no_dispatch():  # States are real, whatever the tensors of the body are.
        return torch.equal(one, other)


def _has_generator(device: torch.device) -> bool:
    return device.type != "meta" and hasattr(_module_of(device), "get_rng_state")


def _module_of(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _index_of(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type in ("cpu", "mps") else (device,)


# Writes in a kept part: memory that is kept has its last value anyway, of other memory there are copies.


@final
class WriteCopies:
    """What the operators of a part have written, as it was when each had run.

    Of memory that is written again and again the last copy will do, unless somebody reads it in between.
    """

    def __init__(self) -> None:
        self._kept: set[int] = set()
        #: The entry and the place in it of the last copy, by the geometry of the tensor that was written.
        self._last: dict[tuple[object, ...], tuple[OperatorRecord, int]] = {}

    def of(self, written: Sequence[Tensor]) -> list[Tensor | None]:
        """Copies of what an operator has just written, None for memory that is kept."""
        return [None if storage_key(tensor) in self._kept else tensor.clone() for tensor in written]

    def note(self, entry: OperatorRecord, written: Sequence[Tensor]) -> None:
        """These copies are in the entry; older ones are not needed any more."""
        for place, tensor in enumerate(written):
            if entry.written[place] is None or tensor.layout is not torch.strided:
                continue
            key = (storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if key in self._last:
                older, its_place = self._last[key]
                older.written[its_place] = None
            self._last[key] = (entry, place)

    def note_kept(self, entry: OperatorRecord) -> None:
        """The results of the entry are kept, with whatever is written to them."""
        self._kept.update(map(storage_key, tensors_in(entry.result)))

    def note_reader(self) -> None:
        """An operator that will run again may read what was written."""
        self._last.clear()


# What one kept operator gave and wrote, and how that is given back.


class Cast(Enum):
    """The casts that autocast makes of what needs gradients: it remembers those of leaves."""

    OF_LEAF = auto()
    OF_RESULT = auto()


@final
class OperatorRecord:
    """The results of an operator, how often they had been written when the kept part was over, and what it wrote."""

    __slots__ = ("cast", "is_made_again", "operator", "result", "versions", "written")

    def __init__(self, operator: Any, args: Any, result: Any, written: Sequence[Tensor | None]) -> None:
        self.operator = operator
        count = _returned_writes(operator)
        if isinstance(result, Tensor):
            self.result: Any = None if count else _without_history(result)
        else:
            leaves, structure = pytree.tree_flatten(result)
            leaves[:count] = [None] * count
            kept = [_without_history(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self.result = pytree.tree_unflatten(kept, structure)
        #: Copies of what it wrote to, None where that is kept anyway or written once more.
        self.written = list(written)
        self.versions: list[int | None] = []
        self.cast = cast_by(operator, args)
        #: Whether it only stands for an operator that is computed again.
        self.is_made_again = False

    def close(self) -> None:
        """The kept part is over: writes so far belong to it."""
        self.versions = [version_of(leaf) for leaf in tensors_in(self.result)]

    def let_go(self) -> None:
        """The operator runs again."""
        self.is_made_again, self.result = True, None

    def keep(self, result: Tensor) -> None:
        """It does not, after all."""
        self.is_made_again, self.result = False, _without_history(result)

    def given_back(self, written: Sequence[Tensor]) -> Any:
        """What the operator gives; `written` are the tensors that it was to write, and has written now."""
        if self.versions != [version_of(leaf) for leaf in tensors_in(self.result)]:
            raise RecomputeError(
                f"a result of {self.operator} was kept for the backward and then changed in place, so it cannot be "
                "used again; keep something else, or write to a copy"
            )
        for tensor, value in zip(written, self.written, strict=True):
            if value is not None:
                tensor.copy_(value)
        # A new tensor each time: autograd writes its history into what it is given.
        if isinstance(self.result, Tensor):
            return self.result.detach()
        leaves, structure = pytree.tree_flatten(self.result)
        found = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        count = _returned_writes(self.operator)
        found[:count] = written[:count]
        return pytree.tree_unflatten(found, structure)


@cache
def allocates_result(func: Any) -> bool:
    """Whether an operator gives something new, which can be kept.

    A view is made again, since it would keep what it looks at, and so are shapes changed in place (`t_`): the tensor
    that stands for what is kept has the shape from before.
    """
    if func in _NOT_KEPT or torch.Tag.inplace_view in getattr(func, "tags", ()):
        return False
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return not any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def cast_by(func: Any, args: Any) -> Cast | None:
    """What kind of cast an operator is; None for other operators, and where no gradients are needed."""
    if func is not torch.ops.aten._to_copy.default or not args[0].requires_grad:
        return None
    return Cast.OF_LEAF if is_trained(args[0]) else Cast.OF_RESULT


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes, as far as its schema says."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_in(given)


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors of a tree."""
    if isinstance(result, Tensor):
        return [result]
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _without_history(tensor: Tensor) -> Tensor:
    """The same memory under another tensor; a write to one counts for both, which below autograd has to be said."""
    if tensor.is_inference():
        return tensor.detach()
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


@cache
def _returned_writes(func: Any) -> int:
    """How many of the first results of an operator are the tensors themselves that it wrote."""
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return sum(result.alias_info is not None and result.alias_info.is_write for result in returns)


#: What autograd and its hooks call beside the operators of a body, and not equally often in each run.
_NOT_KEPT: frozenset[Any] = frozenset(getattr(checkpoint, "SAC_IGNORED_OPS", ())) | {torch.ops.aten.detach.default}
