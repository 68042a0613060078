"""The inputs of a body for its first run and for recomputation: copies of what is mutated, and the rest as saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partita._torch.operator_schemas import storage_key
from partita._torch.pytrees import leaves_of
from partita._torch.stacks import active_saved_tensor_hooks
from partita._torch.tensors import version_of, wants_gradients
from partita.errors import RecomputeError, listed
from partita.recompute._torch.captured_state import (
    BodyState,
    GradientFlags,
    TensorWatch,
    holding,
    refuse_mutations,
    snapshot_of,
)
from partita.recompute._torch.checkpoint_plan import CheckpointPlan

#: Dynamo skips the frames of this module: they run around bodies after a graph break.
DYNAMO_SKIPS = True


def named_tensors(operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors in arguments, by their names in error messages."""
    found: dict[str, Tensor] = {}
    for key, value in (*enumerate(operands), *keywords.items()):
        leaves = [value] if isinstance(value, Tensor) else leaves_of(value)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                found[f"argument {key}" if len(leaves) == 1 else f"argument {key}, item {place}"] = leaf
    return found


@final
class RunInputs:
    """The arguments of a body and the tensors that its modules hold, for its first run and for those after it.

    What is mutated is copied. Under saved-tensor hooks (an enclosing checkpoint, offloading) all of it is saved through
    these, else it is held here. Autograd history is never held: where a body mutates its input, the history refers back
    to this object.
    """

    def __init__(
        self, state: BodyState, plan: CheckpointPlan | None, operands: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        arguments = named_tensors(operands, keywords)
        #: A body may mutate containers, so the first run gets those of the caller; afterwards they are released.
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (operands, dict(keywords))
        leaves, self._structure = pytree.tree_flatten(self._first)
        self._leaves = [_Number(id(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._state = state
        self._is_graph = plan is not None
        self._is_planned = plan is not None and plan.is_complete
        self._copies = InputCopies(plan, state, arguments, operands)
        self._unmutated: dict[int, UnmutatedInput] = {}
        self._is_handed_over = False
        self._hold(arguments)

    @property
    def has_copies(self) -> bool:
        """Whether anything is mutated, or may be."""
        return len(self._copies) > 0

    def hand_over(self) -> list[Tensor]:
        """The tensors to be saved through the active saved-tensor hooks, if any; `again` gets them in this order."""
        self._is_handed_over = active_saved_tensor_hooks() is not None
        if not self._is_handed_over:
            return []
        unmutated = [value.hand_over() for value in self._unmutated.values() if value.can_be_saved]
        return [*self._copies.hand_over(), *unmutated]

    def first(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments themselves, once."""
        assert self._first is not None
        arguments, self._first = self._first, None
        return arguments

    def after_first_run(self, before: TensorWatch) -> None:
        """Refuses mutations without copies, and releases needless copies; `before` watches what could be mutated."""
        mutated = before.changed()
        uncopied = [name for name in mutated if not self._copies.have(before.tensors[name])]
        refuse_mutations(uncopied, is_graph=self._is_graph, is_planned=self._is_planned)
        if self._is_handed_over or self._copies.are_all_needed:
            return
        self._copies.release_unmutated(before.tensors.values(), [before.tensors[name] for name in mutated])
        self._hold(before.tensors)

    @contextmanager
    def again(self, saved: Sequence[Tensor]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments for a later run; inside, the state of the body's modules is that of the first run."""
        self._watch.check()
        fresh = self._copies.fresh(saved)
        rest = iter(saved[len(self._copies) :])
        unmutated = {
            number: value.tensor(next(rest) if self._is_handed_over and value.can_be_saved else None)
            for number, value in self._unmutated.items()
        }
        tensors = {**unmutated, **fresh}
        leaves = [tensors[leaf] if isinstance(leaf, _Number) else leaf for leaf in self._leaves]
        slots = {slot: fresh.get(id(slot.tensor), slot.tensor) for slot in self._state.slots}
        with (
            self._flags.restored(),
            self._state.training_restored(),
            holding({slot: tensor for slot, tensor in slots.items() if slot.held() is not tensor}),
        ):
            yield self._structure.unflatten(leaves)

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Holds those of these arguments that have no copy, and watches the state of modules."""
        numbers = {leaf for leaf in self._leaves if isinstance(leaf, _Number)} - self._unmutated.keys()
        for name, tensor in tensors.items():
            if id(tensor) in numbers and not self._copies.have(tensor):
                self._unmutated[id(tensor)] = UnmutatedInput(tensor, name)
        slots = [slot for slot in self._state.slots if not self._copies.have(slot.tensor)]
        self._watch = TensorWatch({slot.name: slot.tensor for slot in slots})
        leaves = [value.leaf for value in self._unmutated.values() if value.leaf is not None]
        self._flags = GradientFlags((*self._watch.tensors.values(), *leaves))


class _Number(int):
    """The identity of a tensor, in its place in the arguments."""


@final
class InputCopies:
    """Copies of the memory that is mutated, or that may be where that is unknown; tensors go by their identity.

    Copied storage by storage, so that aliases stay aliases.
    """

    def __init__(
        self, plan: CheckpointPlan | None, state: BodyState, arguments: Mapping[str, Tensor], operands: tuple[Any, ...]
    ) -> None:
        self._known_mutated = _known_mutated(plan, state, operands)
        is_known = plan is None or plan.is_complete or not plan.mutating
        may_copy = bool(self._known_mutated) or not is_known
        groups = _by_storage((*arguments.values(), *state.tensors().values())) if may_copy else {}
        self._copies = {
            key: _copy(group, arguments)
            for key, group in groups.items()
            if key in self._known_mutated or not (is_known or _is_not_copied(group))
        }
        self._places = {id(tensor): (key, place) for key in self._copies for place, tensor in enumerate(groups[key])}

    @property
    def are_all_needed(self) -> bool:
        """Whether it was known that all of the copied memory is mutated."""
        return self._known_mutated.issuperset(self._copies)

    def have(self, tensor: Tensor) -> bool:
        """Whether a tensor was copied; it must be alive since then."""
        return id(tensor) in self._places

    def hand_over(self) -> list[Tensor]:
        """The copies, to be saved elsewhere; they are released here."""
        found = [copy.memory for copy in self._copies.values() if copy.memory is not None]
        for copy in self._copies.values():
            copy.memory = None
        return found

    def release_unmutated(self, tensors: Iterable[Tensor], mutated: Iterable[Tensor]) -> None:
        """Drops copies of memory that turned out not to be mutated."""
        rest = self._copies.keys() - self._known_mutated
        rest -= {self._places[id(tensor)][0] for tensor in mutated if self.have(tensor)}
        groups = self._groups(tensors)
        # Inference tensors have no version counters.
        dropped = {
            key for key in rest if not groups[key][0].is_inference() and not self._copies[key].differs(groups[key])
        }
        self._copies = {key: copy for key, copy in self._copies.items() if key not in dropped}
        self._places = {number: place for number, place in self._places.items() if place[0] not in dropped}

    def fresh(self, memories: Sequence[Tensor]) -> dict[int, Tensor]:
        """Fresh tensors that replace those that were copied; `memories` are the copies that were handed over."""
        saved = iter(memories)
        tensors = {
            key: copy.fresh(next(saved) if copy.memory is None else copy.memory) for key, copy in self._copies.items()
        }
        return {number: tensors[key][place] for number, (key, place) in self._places.items()}

    def _groups(self, tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
        """The tensors that were copied together, whatever storage they have by now."""
        alive = {id(tensor): tensor for tensor in tensors}
        groups: dict[int, list[Tensor]] = {}
        for number, (key, _) in self._places.items():
            groups.setdefault(key, []).append(alive[number])
        return groups

    def __len__(self) -> int:
        return len(self._copies)


def _known_mutated(plan: CheckpointPlan | None, state: BodyState, operands: tuple[Any, ...]) -> set[int]:
    """The storages that are known to be mutated; a function that is no graph must not mutate."""
    if plan is None or not (plan.mutated_inputs or plan.mutated_state or state.statistics):
        return set()
    names = {*plan.mutated_state, *state.statistics}
    arguments = leaves_of([operands[place] for place in plan.mutated_inputs])
    state_tensors = [slot.tensor for slot in state.slots if slot.name in names]
    return {storage_key(leaf) for leaf in (*arguments, *state_tensors) if isinstance(leaf, Tensor)}


def _is_not_copied(group: Sequence[Tensor]) -> bool:
    """Parameters are large and rarely mutated; tensors without a storage cannot be copied."""
    return all(isinstance(tensor, nn.Parameter) for tensor in group) or not all(map(_has_memory, group))


def _copy(group: Sequence[Tensor], arguments: Mapping[str, Tensor]) -> _StorageCopy:
    if all(map(_has_memory, group)):
        return _StorageCopy(group)
    names = [name for name, tensor in arguments.items() if any(tensor is other for other in group)]
    raise RecomputeError(
        f"{listed(names)} is mutated, but is sparse or opaque, and such tensors cannot be copied for recomputing the "
        "region; leave what reads or mutates it out of the region"
    )


@final
class _StorageCopy:
    """A bitwise copy of one storage, and how each tensor of a group views it; the tensors are not kept alive."""

    def __init__(self, group: Sequence[Tensor]) -> None:
        # A body may change shapes in-place, and a mutation may make a tensor require gradients.
        self._views = [_view_of(tensor) for tensor in group]
        # The dtype for the whole group: gradients pass few conversions, and small items divide large ones.
        ranks = [(not view.wants_gradients, view.dtype.itemsize) for view in self._views]
        self._first = ranks.index(min(ranks))
        self._is_inference = group[0].is_inference()
        with torch.no_grad():
            #: The copy itself; None once saved-tensor hooks have packed it.
            self.memory: Tensor | None = _memory(group[self._first]).clone()
        _check_gradients(self._views, self.memory.dtype)

    def differs(self, group: Sequence[Tensor]) -> bool:
        """Whether the memory of the group was mutated since."""
        assert self.memory is not None
        return hasattr(group[0], "fake_mode") or not torch.equal(_memory(group[self._first]), self.memory)

    def fresh(self, memory: Tensor) -> list[Tensor]:
        """Tensors like those of the group, in its order, over memory of their own with the values of `memory`."""
        # Autograd forbids in-place operations on leaves, and a clone is not a leaf.
        with torch.inference_mode() if self._is_inference else torch.enable_grad():
            memory = memory.detach()
            if any(view.wants_gradients for view in self._views):
                memory.requires_grad_()
            if (whole := self._whole_copy(memory)) is not None:
                return [whole]
            memory = memory.clone()
            found = [_tensor_over(memory, view) for view in self._views]
        # Outside of inference mode, more operators can mutate an inference tensor once it is detached.
        return [tensor.detach() for tensor in found] if self._is_inference else found

    def _whole_copy(self, memory: Tensor) -> Tensor | None:
        """A copy that is no view, if one tensor has all of the memory: torch refuses `detach_` of a view."""
        view, *others = self._views
        shape, _, offset = view.geometry
        if others or self._is_inference or offset != 0 or math.prod(shape) != len(memory) or not view.is_plain(memory):
            return None
        tensor = _tensor_over(memory, view)
        copied = tensor.clone()
        return copied if copied.stride() == tensor.stride() else None


class _View(NamedTuple):
    """How a tensor views its storage."""

    dtype: torch.dtype
    geometry: tuple[Sequence[int], Sequence[int], int]
    is_conjugate: bool
    is_negative: bool
    wants_gradients: bool

    def is_plain(self, memory: Tensor) -> bool:
        """Whether the values are those that the memory contains."""
        return self.dtype == memory.dtype and not self.is_conjugate and not self.is_negative


def _view_of(tensor: Tensor) -> _View:
    geometry = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return _View(tensor.dtype, geometry, tensor.is_conj(), tensor.is_neg(), wants_gradients(tensor))


def _memory(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as a flat tensor of its dtype."""
    tensor = tensor.detach()
    # A copy would resolve lazy conjugation and negation, which the memory does not contain.
    tensor = tensor.conj() if tensor.is_conj() else tensor
    tensor = torch.ops.aten._neg_view.default(tensor) if tensor.is_neg() else tensor
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _tensor_over(flat: Tensor, view: _View) -> Tensor:
    """A tensor that views flat memory so."""
    whole = _as_dtype(flat if view.wants_gradients else flat.detach(), view.dtype)
    found = whole.as_strided(*view.geometry)
    found = found.conj() if view.is_conjugate else found
    return torch.ops.aten._neg_view.default(found) if view.is_negative else found


def _as_dtype(flat: Tensor, dtype: torch.dtype) -> Tensor:
    if flat.dtype == dtype:
        return flat
    ratio = max(1, dtype.itemsize // flat.dtype.itemsize)
    whole = flat[: len(flat) // ratio * ratio]
    return torch.view_as_complex(whole.unflatten(0, (-1, 2))) if _is_real_of(flat.dtype, dtype) else whole.view(dtype)


def _check_gradients(views: Sequence[_View], memory: torch.dtype) -> None:
    for view in views:
        if view.wants_gradients and view.dtype != memory and not _is_real_of(memory, view.dtype):
            raise RecomputeError(
                f"a body with mutations has inputs that view one storage as {view.dtype} and as {memory}, and both "
                "require gradients; pass a copy of one of them, or exclude the mutations from the region"
            )


def _is_real_of(real: torch.dtype, dtype: torch.dtype) -> bool:
    return dtype.is_complex and dtype.to_real() == real


def _by_storage(tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """The tensors grouped by storage, without duplicates."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        groups.setdefault(storage_key(tensor), []).append(tensor)
    return groups


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a view of one storage: sparse and opaque ones are not."""
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return tensor.layout is torch.strided


@final
class UnmutatedInput:
    """An argument that is not mutated, without its history: held or saved until the body runs again, not copied."""

    __slots__ = ("_before", "_held", "_name", "_requires_grad", "can_be_saved", "leaf")

    def __init__(self, tensor: Tensor, name: str) -> None:
        self._name = name
        self._requires_grad = wants_gradients(tensor)
        self.can_be_saved = not tensor.is_inference()
        #: The argument itself if it is a leaf such as a weight, which is alive anyway; autocast caches its casts.
        self.leaf = tensor if is_trained(tensor) else None
        self._held: Tensor | None = None
        if self.leaf is not None:
            self._before: object = snapshot_of(tensor)
        else:
            self._before = version_of(tensor)
            self._held = tensor.detach() if self.can_be_saved else tensor

    def hand_over(self) -> Tensor:
        """The tensor, to be saved elsewhere; it is released here."""
        held, self._held = self._held, None
        if held is None:
            assert self.leaf is not None
            return self.leaf.detach()
        return held

    def tensor(self, saved: Tensor | None) -> Tensor:
        """The argument for another run, from what was saved elsewhere, if it was handed over.

        The saver returns the tensor that it got, even if it was mutated since; one held here must be unmutated.
        """
        if self.leaf is not None:
            if snapshot_of(self.leaf) == self._before:
                return self.leaf
            if saved is None:
                raise RecomputeError(
                    f"{self._name!r} was mutated between forward and backward, so the region that reads it would "
                    "be recomputed with other values; run backward before you update what it needs"
                )
        if saved is None:
            saved = self._unchanged()
        return _requiring_gradients(saved) if self._requires_grad else saved

    def _unchanged(self) -> Tensor:
        assert self._held is not None
        if version_of(self._held) != self._before:
            raise RecomputeError(
                f"{self._name!r} was mutated between the region and its backward, so the region would be "
                "recomputed with other values; mutate a copy, or leave what reads it out of the region"
            )
        return self._held if self._held.is_inference() else self._held.detach()


def is_trained(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf that requires gradients."""
    return wants_gradients(tensor) and tensor.is_leaf


def _requiring_gradients(tensor: Tensor) -> Tensor:
    """The same values, requiring gradients; not a leaf, since autocast would cache its casts."""
    leaf = tensor.detach().requires_grad_()
    if leaf.layout is not torch.strided:
        return leaf
    with torch.enable_grad():
        alias: Tensor = torch.ops.aten.alias.default(leaf)
    return alias
