"""What a body is given when it runs again: its inputs as they were before it wrote to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partita._torch.checkpoint_facts import BodyFacts
from partita._torch.checkpoint_saved import is_trained, named_leaves
from partita._torch.schemas import storage_key, version_of
from partita.errors import RecomputeError

__all__ = ["StateWatch", "WrittenInputs"]


class StateWatch:
    """The parameters and buffers of a body, which must be at the second run what they were after the first."""

    def __init__(self, body: Any, *, without: Collection[int] = ()) -> None:
        self._state = {name: tensor for name, tensor in _state(body) if id(tensor) not in without}
        self._versions = _versions(self._state)
        self._slots = [slot for slot in _slots(body) if id(slot.tensor) not in without]
        self._statistics = [name for name in _statistics(body) if name in self._state]

    def tensors(self) -> Collection[Tensor]:
        """What is watched."""
        return self._state.values()

    def settle(self) -> None:
        """The first run is over: from now on nothing may change."""
        _refuse_writes([*self._statistics, *_changed(self._state, self._versions)])

    def check(self) -> None:
        """Before the second run."""
        changed = _changed(self._state, self._versions)
        if changed:
            raise RecomputeError(
                f"{_listed(changed)} changed in place between forward and backward, so the region that reads it would "
                "be recomputed with other values; run backward before you update what it needs"
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """While the body runs again, its modules hold what they held at the first run, whatever was put there since."""
        with _holding({slot: slot.tensor for slot in self._slots if slot.held() is not slot.tensor}):
            yield


class WrittenInputs:
    """The arguments and the state of a body that are written, by itself or later, with copies from before.

    Copies are made storage by storage, so that arguments that are views of one another still are. When the first run is
    over, only the copies of what is written stay.
    """

    def __init__(self, body: Any, facts: BodyFacts, operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        #: For the first run; a body may write to containers as well.
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (operands, dict(keywords))
        self._leaves, self._structure = pytree.tree_flatten(self._first)
        told_names = set(facts.written)
        self._slots = [slot for slot in _slots(body) if slot.is_buffer or slot.name in told_names]
        self._knows_written = facts.knows_written
        self._watch = StateWatch(body, without={id(slot.tensor) for slot in self._slots})
        named = {name: leaf for name, leaf in named_leaves(operands, keywords) if isinstance(leaf, Tensor)}
        self._tensors: dict[str, Tensor] = {**named, **{slot.name: slot.tensor for slot in self._slots}}
        told = [operands[place] for place in facts.written if isinstance(place, int)]
        told += [slot.tensor for slot in self._slots if slot.name in facts.written]
        self._told = {storage_key(leaf) for leaf in pytree.tree_leaves(told) if isinstance(leaf, Tensor)}
        # Whoever writes nothing himself needs copies of what others write only; parameters are rarely written.
        own = self._tensors.values() if facts.writers else ()
        wanted = self._told | {storage_key(tensor) for tensor in own if not isinstance(tensor, nn.Parameter)}
        groups = _by_storage(self._tensors.values())
        self._copies = {key: _Copy(group) for key, group in groups.items() if key in wanted}
        self._versions = _versions(self._tensors)

    def tensors(self) -> list[Tensor]:
        """All that the body is given, and all that it holds."""
        return [*self._tensors.values(), *self._watch.tensors()]

    def settle(self) -> None:
        """The first run is over."""
        self._watch.settle()
        changed = _changed(self._tensors, self._versions)
        _refuse_writes([name for name in changed if storage_key(self._tensors[name]) not in self._copies])
        written = {storage_key(self._tensors[name]) for name in changed}
        # Nobody counts writes to inference tensors.
        written |= {storage_key(tensor) for tensor in self._tensors.values() if tensor.is_inference()} | self._told
        if not self._knows_written:
            rest = {storage_key(tensor): tensor for tensor in self._tensors.values()}
            written |= {key for key in self._copies.keys() - written if self._copies[key].differs(rest[key])}
        self._copies = {key: copy for key, copy in self._copies.items() if key in written}
        self._versions = _versions(self._tensors)
        self._first = None

    @contextmanager
    def given(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments for a run; while it lasts, the body's buffers are those that it should read."""
        if self._first is not None:
            yield self._first
            return
        self._check()
        fresh = {key: copy.fresh() for key, copy in self._copies.items()}
        leaves = [_replaced(leaf, fresh) for leaf in self._leaves]
        with self._watch.restored(), _holding({slot: _replaced(slot.tensor, fresh) for slot in self._slots}):
            yield pytree.tree_unflatten(leaves, self._structure)

    def _check(self) -> None:
        self._watch.check()
        changed = [
            name
            for name in _changed(self._tensors, self._versions)
            if storage_key(self._tensors[name]) not in self._copies
        ]
        if changed:
            raise RecomputeError(
                f"{_listed(changed)} changed in place between the region and its backward, so the region would be "
                "recomputed with other values; write to a copy, or leave what reads it out of the region"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Where a module of a body holds a tensor."""

    name: str
    table: dict[str, Any]
    key: str
    tensor: Tensor
    is_buffer: bool

    def held(self) -> Any:
        return self.table.get(self.key)

    def hold(self, tensor: Any) -> None:
        self.table[self.key] = tensor


@contextmanager
def _holding(tensors: Mapping[_Slot, Tensor]) -> Iterator[None]:
    """Inside, the slots hold these tensors."""
    before = {slot: slot.held() for slot in tensors}
    for slot, tensor in tensors.items():
        slot.hold(tensor)
    try:
        yield
    finally:
        for slot, tensor in before.items():
            slot.hold(tensor)


def _slots(body: Any) -> list[_Slot]:
    """All places in the modules of a body that hold a tensor."""
    return [
        _Slot(f"{path}.{key}" if path else key, table, key, tensor, table is module._buffers)
        for path, module in (body.named_modules() if isinstance(body, nn.Module) else ())
        for table in (module._parameters, module._buffers)
        for key, tensor in table.items()
        if tensor is not None
    ]


class _Copy:
    """One storage as it was, and the tensors that look at it."""

    def __init__(self, group: Sequence[Tensor]) -> None:
        # A body may change shapes in place, and a write may make a tensor require gradients.
        self._group = [
            (id(tensor), tensor.requires_grad, (tensor.shape, tensor.stride(), tensor.storage_offset()))
            for tensor in group
        ]
        first = group[0]
        if any(tensor.dtype != first.dtype for tensor in group):
            raise RecomputeError("a body that writes is given one memory under two dtypes; leave it out of the region")
        with torch.no_grad():
            self._flat = _flat(first).clone()

    def differs(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor of the group is not any more what it was."""
        return hasattr(tensor, "fake_mode") or not torch.equal(_flat(tensor), self._flat)

    def fresh(self) -> dict[int, Tensor]:
        """Tensors like the group's, by identity, over memory of their own."""
        found = {}
        with torch.enable_grad():
            flat = self._flat.detach()
            if any(requires_grad for _, requires_grad, _ in self._group):
                flat.requires_grad_()
            flat = flat.clone()  # Autograd lets nobody write to a leaf.
            for key, requires_grad, geometry in self._group:
                like = flat.as_strided(*geometry)
                found[key] = like if requires_grad else like.detach()
        return found


def _flat(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor looks into."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


def _by_storage(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(storage_key(tensor), []).append(tensor)
    return groups


def _replaced(value: Any, fresh: Mapping[int, Mapping[int, Tensor]]) -> Any:
    if not isinstance(value, Tensor):
        return value
    return fresh.get(storage_key(value), {}).get(id(value), value)


def _state(body: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(body, Mapping):
        yield from body.items()
    for table in ("named_parameters", "named_buffers"):
        read = getattr(body, table, None)
        if read is not None:
            yield from read()


def _statistics(body: Any) -> Iterator[str]:
    """The names of buffers that norms of a module will update, which torch does not count as writes."""
    for path, module in body.named_modules() if isinstance(body, nn.Module) else ():
        if isinstance(module, _NORMS) and module.training and module.track_running_stats:
            for name in ("running_mean", "running_var"):
                if getattr(module, name) is not None:
                    yield f"{path}.{name}" if path else name


_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def _versions(tensors: Mapping[str, Tensor]) -> list[tuple[object, ...]]:
    """How often each tensor has been written, and what can change without that: shape, memory, gradients wanted."""
    return [(version_of(tensor), tensor.shape, storage_key(tensor), is_trained(tensor)) for tensor in tensors.values()]


def _changed(tensors: Mapping[str, Tensor], versions: Sequence[object]) -> list[str]:
    now = _versions(tensors)
    return [name for name, before, after in zip(tensors, versions, now, strict=True) if before != after]


def _refuse_writes(changed: Sequence[str]) -> None:
    if changed:
        raise RecomputeError(
            f"the body writes to {_listed(changed)}, which recomputing it would do again; trace it into a graph, so "
            "that writes to what it is given and to its buffers can be undone, or leave what writes out of the region"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
