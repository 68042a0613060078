"""What a body is given when it runs first, and when it runs again: its inputs as they were before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor
from torch.utils import _pytree as pytree

from partita._torch.checkpoint_copies import InputCopies
from partita._torch.checkpoint_facts import BodyFacts
from partita._torch.checkpoint_given import GivenTensor
from partita._torch.checkpoint_state import BodyState, GradientFlags, TensorWatch, holding, refuse_writes
from partita._torch.saving_hooks import hooks_at_work

__all__ = ["RunInputs", "named_tensors"]


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
        self, state: BodyState, facts: BodyFacts | None, operands: tuple[Any, ...], keywords: Mapping[str, Any]
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
        self._given: dict[int, GivenTensor] = {}
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
                self._given[id(tensor)] = GivenTensor(tensor, name)
        slots = [slot for slot in self._state.slots if not self._copies.have(slot.tensor)]
        self._watch = TensorWatch({slot.name: slot.tensor for slot in slots})
        leaves = [given.leaf for given in self._given.values() if given.leaf is not None]
        self._flags = GradientFlags((*self._watch.tensors.values(), *leaves))


class _Number(int):
    """Stands for a tensor in arguments."""
