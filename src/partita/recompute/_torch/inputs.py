"""Inputs as they were before the first run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partita._torch.operators.schemas import storage_key
from partita._torch.tensors import StorageCopy, by_storage, has_memory, version_of, wants_gradients
from partita.analysis._torch.body_effects import BodyEffects
from partita.errors import RecomputeError
from partita.program._torch.saved_tensors import hooks_at_work
from partita.recompute._torch.captured_state import (
    BodyState,
    GradientFlags,
    TensorWatch,
    condition_of,
    holding,
    listed,
    refuse_writes,
)

__all__ = ["RunInputs", "is_trained", "named_tensors"]

#: Dynamo leaves the code of this module to Python: it runs around bodies, of which a break has ended the graph.
DYNAMO_SKIPS = True


# What a body is given when it runs first, and when it runs again: its inputs as they were before.


def named_tensors(operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors in arguments, by the names that messages have for them."""
    found: dict[str, Tensor] = {}
    for given, value in (*enumerate(operands), *keywords.items()):
        leaves = [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                found[f"argument {given}" if len(leaves) == 1 else f"argument {given}, item {place}"] = leaf
    return found


@final
class RunInputs:
    """The arguments of a body and the tensors that its modules hold, for its first run and for those after it.

    What is written is copied. Where somebody packs what autograd saves, since he recomputes around it or offloads, all
    this is handed over to him, else it is held here. Its history is not: where a body writes to its input, that leads
    back to whoever holds this.
    """

    def __init__(
        self, state: BodyState, facts: BodyEffects | None, operands: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        arguments = named_tensors(operands, keywords)
        #: A body may write to containers, so that the first run gets those of the caller; then nobody holds them.
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (operands, dict(keywords))
        leaves, self._structure = pytree.tree_flatten(self._first)
        self._leaves = [_Number(id(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._state = state
        self._is_graph = facts is not None
        self._is_planned = facts is not None and facts.knows_written
        self._copies = InputCopies(facts, state, arguments, operands)
        self._given: dict[int, UnmutatedInput] = {}
        self._is_handed_over = False
        self._hold(arguments)

    @property
    def has_copies(self) -> bool:
        """Whether anything is written, or may be."""
        return len(self._copies) > 0

    def hand_over(self) -> list[Tensor]:
        """What whoever packs what autograd saves is to save, if anybody does; `again` is given it back, in order."""
        self._is_handed_over = hooks_at_work() is not None
        if not self._is_handed_over:
            return []
        given = [given.hand_over() for given in self._given.values() if given.can_be_saved]
        return [*self._copies.hand_over(), *given]

    def first(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments themselves, once."""
        assert self._first is not None
        given, self._first = self._first, None
        return given

    def settle(self, before: TensorWatch) -> None:
        """The first run is over; `before` is how everything was that it could write."""
        changed = before.changed()
        uncopied = [name for name in changed if not self._copies.have(before.tensors[name])]
        refuse_writes(uncopied, is_graph=self._is_graph, is_planned=self._is_planned)
        if self._is_handed_over or self._copies.are_all_told:
            return
        self._copies.let_go(before.tensors.values(), [before.tensors[name] for name in changed])
        self._hold(before.tensors)

    @contextmanager
    def again(self, saved: Sequence[Tensor]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments for a later run; while it lasts, the body's modules hold what they should hold."""
        self._watch.check()
        fresh = self._copies.fresh(saved)
        rest = iter(saved[len(self._copies) :])
        given = {
            number: given.tensor(next(rest) if self._is_handed_over and given.can_be_saved else None)
            for number, given in self._given.items()
        }
        made = {**given, **fresh}
        leaves = [made[leaf] if isinstance(leaf, _Number) else leaf for leaf in self._leaves]
        slots = {slot: fresh.get(id(slot.tensor), slot.tensor) for slot in self._state.slots}
        with (
            self._flags.restored(),
            self._state.training_restored(),
            holding({slot: tensor for slot, tensor in slots.items() if slot.held() is not tensor}),
        ):
            yield pytree.tree_unflatten(leaves, self._structure)

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Holds the arguments among these that have no copy as they are, and watches what modules hold."""
        numbers = {leaf for leaf in self._leaves if isinstance(leaf, _Number)} - self._given.keys()
        for name, tensor in tensors.items():
            if id(tensor) in numbers and not self._copies.have(tensor):
                self._given[id(tensor)] = UnmutatedInput(tensor, name)
        slots = [slot for slot in self._state.slots if not self._copies.have(slot.tensor)]
        self._watch = TensorWatch({slot.name: slot.tensor for slot in slots})
        leaves = [given.leaf for given in self._given.values() if given.leaf is not None]
        self._flags = GradientFlags((*self._watch.tensors.values(), *leaves))


class _Number(int):
    """Stands for a tensor in arguments."""


# The inputs of a body that are written, by itself or later, as they were before.


@final
class InputCopies:
    """Copies of the memory that is written, and of all that may be where nobody knows; tensors go by their identity.

    Storage by storage, so that tensors that are views of one another still are.
    """

    def __init__(
        self, facts: BodyEffects | None, state: BodyState, arguments: Mapping[str, Tensor], operands: tuple[Any, ...]
    ) -> None:
        self._told = _told(facts, state, operands)
        is_known = facts is None or facts.knows_written or not facts.writers
        groups = {} if is_known and not self._told else by_storage((*arguments.values(), *state.tensors().values()))
        self._copies = {
            key: _copy(group, arguments)
            for key, group in groups.items()
            if key in self._told or not (is_known or _is_not_copied(group))
        }
        self._places = {id(tensor): (key, place) for key in self._copies for place, tensor in enumerate(groups[key])}

    @property
    def are_all_told(self) -> bool:
        """Whether it was known that all of it is written."""
        return self._told.issuperset(self._copies)

    def have(self, tensor: Tensor) -> bool:
        """Whether a tensor that is alive since then is among what was copied."""
        return id(tensor) in self._places

    def hand_over(self) -> list[Tensor]:
        """The copies, for somebody who saves them; they are not held here any more."""
        found = [copy.memory for copy in self._copies.values() if copy.memory is not None]
        for copy in self._copies.values():
            copy.memory = None
        return found

    def let_go(self, tensors: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Drops copies of memory that nobody has told of, none of `written` looks into, and that is as it was."""
        rest = self._copies.keys() - self._told
        rest -= {self._places[id(tensor)][0] for tensor in written if self.have(tensor)}
        groups = self._groups(tensors)
        # Nobody counts writes to inference tensors.
        dropped = {
            key for key in rest if not groups[key][0].is_inference() and not self._copies[key].differs(groups[key])
        }
        self._copies = {key: copy for key, copy in self._copies.items() if key not in dropped}
        self._places = {number: place for number, place in self._places.items() if place[0] not in dropped}

    def fresh(self, memories: Sequence[Tensor]) -> dict[int, Tensor]:
        """Tensors over new memory in the place of those that were copied; `memories` are what was handed over."""
        saved = iter(memories)
        made = {
            key: copy.fresh(next(saved) if copy.memory is None else copy.memory) for key, copy in self._copies.items()
        }
        return {number: made[key][place] for number, (key, place) in self._places.items()}

    def _groups(self, tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
        """The tensors that are copied together, whatever memory they look into by now."""
        alive = {id(tensor): tensor for tensor in tensors}
        groups: dict[int, list[Tensor]] = {}
        for number, (key, _) in self._places.items():
            groups.setdefault(key, []).append(alive[number])
        return groups

    def __len__(self) -> int:
        return len(self._copies)


def _told(facts: BodyEffects | None, state: BodyState, operands: tuple[Any, ...]) -> set[int]:
    """The storages of which it is known that they are written; a function that is no graph may not write."""
    if facts is None or not (facts.written or state.statistics):
        return set()
    names = {*facts.written, *state.statistics}
    given = pytree.tree_leaves([operands[place] for place in facts.written if isinstance(place, int)])
    held = [slot.tensor for slot in state.slots if slot.name in names]
    return {storage_key(leaf) for leaf in (*given, *held) if isinstance(leaf, Tensor)}


def _is_not_copied(group: Sequence[Tensor]) -> bool:
    """Parameters are rarely written, and large; of what is no view of one storage there are no copies."""
    return all(isinstance(tensor, nn.Parameter) for tensor in group) or not all(map(has_memory, group))


def _copy(group: Sequence[Tensor], arguments: Mapping[str, Tensor]) -> StorageCopy:
    if all(map(has_memory, group)):
        return StorageCopy(group)
    names = [name for name, tensor in arguments.items() if any(tensor is other for other in group)]
    raise RecomputeError(
        f"{listed(names)} is written, but is sparse or opaque, and of such memory there are no copies to recompute the "
        "region with; leave what reads or writes it out of the region"
    )


# An argument of a body that nobody writes, until the body runs again.


@final
class UnmutatedInput:
    """The values of an argument and whether it wants gradients, without its history; they are not copied."""

    __slots__ = ("_before", "_held", "_name", "_wants_gradients", "can_be_saved", "leaf")

    def __init__(self, tensor: Tensor, name: str) -> None:
        self._name = name
        self._wants_gradients = wants_gradients(tensor)
        self.can_be_saved = not tensor.is_inference()
        #: The argument itself, if it is a weight, say, which is alive anyway; autocast remembers what it cast of it.
        self.leaf = tensor if is_trained(tensor) else None
        self._held: Tensor | None = None
        if self.leaf is not None:
            self._before: object = condition_of(tensor)
        else:
            self._before = version_of(tensor)
            self._held = tensor.detach() if self.can_be_saved else tensor

    def hand_over(self) -> Tensor:
        """What somebody else is to save, and to give back; it is not held here any more."""
        held, self._held = self._held, None
        if held is None:
            assert self.leaf is not None
            return self.leaf.detach()
        return held

    def tensor(self, saved: Tensor | None) -> Tensor:
        """The argument once more, from what somebody else has saved of it, if anybody has.

        He gives back what he was given, whatever happened to it since; else it must be what it was.
        """
        if self.leaf is not None:
            if condition_of(self.leaf) == self._before:
                return self.leaf
            if saved is None:
                raise RecomputeError(
                    f"{self._name!r} changed in place between forward and backward, so the region that reads it would "
                    "be recomputed with other values; run backward before you update what it needs"
                )
        if saved is None:
            saved = self._unchanged()
        return _wanting_gradients(saved) if self._wants_gradients else saved

    def _unchanged(self) -> Tensor:
        assert self._held is not None
        if version_of(self._held) != self._before:
            raise RecomputeError(
                f"{self._name!r} changed in place between the region and its backward, so the region would be "
                "recomputed with other values; write to a copy, or leave what reads it out of the region"
            )
        return self._held if self._held.is_inference() else self._held.detach()


def is_trained(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf that needs gradients."""
    return wants_gradients(tensor) and tensor.is_leaf


def _wanting_gradients(tensor: Tensor) -> Tensor:
    """The same values, for which gradients are wanted; no leaf, of which autocast would remember what it casts."""
    leaf = tensor.detach().requires_grad_()
    if leaf.layout is not torch.strided:
        return leaf
    with torch.enable_grad():
        alias: Tensor = torch.ops.aten.alias.default(leaf)
    return alias
