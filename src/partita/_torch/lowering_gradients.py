"""Gradients of compiled code: which inputs those of each output flow to, read from the history of a run of the body.

Compiled code has one backward for all outputs, and gives zeros to an input that only an unused output depends on. Plain
torch gives such an input nothing, and an optimizer can tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

__all__ = ["UnusedGradients", "ask_for_gradients", "has_history", "history_of", "is_locked_view", "links_of"]


def history_of(inputs: Sequence[Any]) -> list[Any]:
    """What each input that requires a gradient is known by in a history; a write gives it another, so ask before."""
    return [
        (value if value.grad_fn is None else value.grad_fn)
        if isinstance(value, Tensor) and value.requires_grad
        else None
        for value in inputs
    ]


def has_history(value: Tensor) -> bool:
    """Whether gradients would flow from a result; not from one that autograd refuses to tell of."""
    try:
        return value.grad_fn is not None
    except RuntimeError:
        return False


def ask_for_gradients(inputs: Sequence[Any], *, but: Collection[int]) -> None:
    """Makes every fake input that can have a gradient ask for one, but for those at some places."""
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and place not in but:
            value.requires_grad_()


def links_of(histories: Sequence[Any], results: Iterable[Any]) -> tuple[frozenset[int], ...]:
    """For each result of a run, the places of the inputs, of these histories, that its gradient flows to."""
    known = {id(history): place for place, history in enumerate(histories) if history is not None}
    return tuple(frozenset(known[at] for at in _reached(result) if at in known) for result in results)


def _reached(result: Any) -> set[int]:
    """The ids of the functions, and of the tensors without one, that a backward pass from `result` would come to."""
    if not isinstance(result, Tensor) or not result.requires_grad:
        return set()
    if result.grad_fn is None:
        return {id(result)}
    # The objects that stand for functions live as long as somebody holds them.
    held: dict[int, Any] = {}
    reached: set[int] = set()
    waiting = [result.grad_fn]
    while waiting:
        function = waiting.pop()
        if id(function) in held:
            continue
        held[id(function)] = function
        variable = getattr(function, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        waiting += [before for before, _ in function.next_functions if before is not None]
    return reached | held.keys()


def is_locked_view(value: Tensor) -> bool:
    """Whether a result is a view that was made inside of one function of autograd, so that nobody may write to it."""
    return value._is_view() and isinstance(value.grad_fn, BackwardCFunction)


class UnusedGradients:
    """Takes the gradients of inputs that no used output depends on out of what one backward for all outputs gives.

    `links` are the places of the inputs that each output depends on, `written` of those that written inputs depend on.
    """

    def __init__(self, links: Sequence[frozenset[int]], written: frozenset[int]) -> None:
        self._links, self._written = links, written
        #: By the place of a gradient: the input that it is for. Found in the first call, since it is always the same.
        self._inputs: dict[int, frozenset[int]] | None = None

    def before(self, inputs: Sequence[Any]) -> list[Any]:
        """What must be known of the inputs of a call before they are written."""
        return history_of(inputs) if self._inputs is None else []

    def watch(self, histories: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Sees to the backward of a call that gave `outputs` for inputs of these histories."""
        made = (value.grad_fn for value in outputs if isinstance(value, Tensor))
        function: Any = next((history for history in made if isinstance(history, BackwardCFunction)), None)
        if function is None:
            return
        if self._inputs is None:
            self._inputs = _inputs_of(function, histories)
        places, links = self._inputs, self._links
        known = {
            value.output_nr: links[place]
            for place, value in enumerate(outputs)
            if isinstance(value, Tensor) and value.grad_fn is function
        }

        # What the function gives beside these outputs: new values of inputs, and what other outputs are views of.
        direct = known.values()
        hidden = self._written.union(*(link for link in links if link not in direct))

        def hook(given: Sequence[Any], used: Sequence[Any]) -> tuple[Any, ...]:
            numbers = (number for number, gradient in enumerate(used) if gradient is not None)
            needed = frozenset[int]().union(*(known.get(number, hidden) for number in numbers))
            return tuple(
                None if at in places and not places[at] & needed else gradient for at, gradient in enumerate(given)
            )

        function.register_hook(hook)


def _inputs_of(function: Any, histories: Sequence[Any]) -> dict[int, frozenset[int]]:
    """The places of the input that each gradient which `function` gives is for; one tensor may be given twice."""
    known: dict[int, set[int]] = {}
    for place, history in enumerate(histories):
        if history is not None:
            known.setdefault(id(history), set()).add(place)
    found: dict[int, frozenset[int]] = {}
    for at, (before, _) in enumerate(function.next_functions):
        target = getattr(before, "variable", None)
        places = known.get(id(before if target is None else target))
        if places is not None:
            found[at] = frozenset(places)
    return found
