"""The inputs of a body that are written, by itself or later, as they were before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partita._torch.checkpoint_facts import BodyFacts
from partita._torch.checkpoint_state import BodyState, listed
from partita._torch.schemas import storage_key
from partita._torch.storage_copies import StorageCopy, by_storage, has_memory
from partita.errors import RecomputeError

__all__ = ["InputCopies"]


@final
class InputCopies:
    """Copies of the memory that is written, and of all that may be where nobody knows; tensors go by their identity.

    Storage by storage, so that tensors that are views of one another still are.
    """

    def __init__(
        self, facts: BodyFacts | None, state: BodyState, arguments: Mapping[str, Tensor], operands: tuple[Any, ...]
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


def _told(facts: BodyFacts | None, state: BodyState, operands: tuple[Any, ...]) -> set[int]:
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
