"""Gradients of compiled code: which inputs the gradient of each output flows to, read from the autograd graph.

Compiled code has one backward for all outputs, and returns zeros for an input that only an unused output depends on.
Eager mode leaves the gradient of such an input None, and optimizers treat the two differently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


def history_of(inputs: Sequence[Any]) -> list[Any]:
    """The `grad_fn` of each input that requires a gradient, or a leaf itself; mutation replaces it."""
    return [
        (value if value.grad_fn is None else value.grad_fn)
        if isinstance(value, Tensor) and value.requires_grad
        else None
        for value in inputs
    ]


def has_history(value: Tensor) -> bool:
    """Whether a result has a `grad_fn`; not where autograd refuses to return it."""
    try:
        return value.grad_fn is not None
    except RuntimeError:
        return False


def hides_history(value: Any) -> bool:
    """Whether autograd refuses to return the `grad_fn`: one of several views from one call, whose base was mutated."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return False
    try:
        _ = value.grad_fn
    except RuntimeError:
        return True
    return False


def autograd_base(value: Any) -> Any:
    """The tensor of which autograd has a value as a view, or the value itself; a detached one is a view of nothing."""
    return value._base if isinstance(value, Tensor) and value._is_view() else value


def require_gradients(inputs: Sequence[Any], *, but: Collection[int]) -> None:
    """Makes every fake input that can have a gradient require one, except for those at the places in `but`."""
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and place not in but:
            value.requires_grad_()


def links_of(histories: Sequence[Any], results: Iterable[Any]) -> tuple[frozenset[int], ...]:
    """For each result of a run, the places of the inputs, of these histories, that its gradient flows to."""
    known = {id(history): place for place, history in enumerate(histories) if history is not None}
    return tuple(frozenset(known[at] for at in _reached(result) if at in known) for result in results)


def _reached(result: Any) -> set[int]:
    """The ids of the autograd functions, and of the leaf tensors, that a backward pass from `result` would reach."""
    if not isinstance(result, Tensor) or not result.requires_grad:
        return set()
    if not has_history(result):
        return {id(result)}
    functions = _functions_behind(result)
    variables = (getattr(function, "variable", None) for function in functions)
    return {*map(id, functions), *(id(variable) for variable in variables if variable is not None)}


def _functions_behind(result: Tensor) -> list[Any]:
    """The autograd functions that a backward pass would reach; referenced, since their Python objects die otherwise."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [result.grad_fn]
    while waiting:
        function = waiting.pop()
        if id(function) not in found:
            found[id(function)] = function
            waiting += [before for before, _ in function.next_functions if before is not None]
    return list(found.values())


def is_locked_view(value: Tensor) -> bool:
    """Whether a result is a view made inside of a custom autograd function, which must not be mutated."""
    return value._is_view() and isinstance(value.grad_fn, BackwardCFunction)


@final
@dataclass(frozen=True, slots=True)
class NoGradView:
    """An output that is a view made under `no_grad`, or a view of such: it requires grad, but no gradient flows on.

    AOTAutograd (torch 2.13) makes such an output a view like any other, through which gradients flow.
    """

    place: int
    is_leaf: bool

    def of(self, value: Tensor) -> Tensor:
        """An output of compiled code as such a view."""
        base = value if value.requires_grad else value.detach().requires_grad_()
        with torch.no_grad():
            view = base.view_as(base)
        if self.is_leaf:
            return view
        with torch.enable_grad():
            return view.view_as(view)


def no_grad_views(inputs: Iterable[Any], results: Sequence[Any]) -> tuple[NoGradView, ...]:
    """Which results of a run are such views; `inputs` are tensors and their histories."""
    known = {id(history) for history in inputs if history is not None}
    return tuple(
        NoGradView(place, is_leaf=not has_history(value))
        for place, value in enumerate(results)
        if known and _is_no_grad_view(value, known)
    )


def _is_no_grad_view(value: Any, known: Collection[int]) -> bool:
    if not isinstance(value, Tensor) or not value._is_view() or not value.requires_grad or id(value) in known:
        return False
    # The autograd graph of such a view reaches no input, and no other leaf.
    functions = _functions_behind(value) if has_history(value) else []
    return not any(id(function) in known or hasattr(function, "variable") for function in functions)


#: The autograd identity of an input and its output number; the identity is None for an input without gradient.
Edge: TypeAlias = tuple[Any, int]


def edges_of(inputs: Sequence[Any]) -> list[Edge]:
    """The autograd edge of each input; two results of one function differ in their numbers."""
    pairs = zip(history_of(inputs), inputs, strict=True)
    return [(history, 0 if history is None else value.output_nr) for history, value in pairs]


def links_between(edges: Sequence[Edge], results: Sequence[Any]) -> tuple[frozenset[int], ...]:
    """For each result, the places of the inputs, of these edges, that its gradient reaches first.

    Unlike `links_of` it allows inputs that are computed from one another; they must not have been mutated since.
    """
    known = {(id(history), number): place for place, (history, number) in enumerate(edges) if history is not None}
    return tuple(frozenset(_first_reached(known, value)) for value in results)


def _first_reached(known: Mapping[tuple[int, int], int], result: Any) -> set[int]:
    if not isinstance(result, Tensor) or not result.requires_grad or not has_history(result):
        at = (id(result), 0)
        return {known[at]} if at in known else set()
    held: dict[int, Any] = {}
    reached: set[int] = set()
    waiting: list[Edge] = [(result.grad_fn, result.output_nr)]
    while waiting:
        function, number = waiting.pop()
        variable = getattr(function, "variable", None)
        at = (id(function if variable is None else variable), number)
        if at in known:
            reached.add(known[at])
        elif id(function) not in held:
            held[id(function)] = function
            waiting += [edge for edge in function.next_functions if edge[0] is not None]
    return reached


class UnusedGradients:
    """Removes the gradients of inputs that no used output depends on from the results of a joint backward.

    `links` are the places of the inputs that each output depends on; `mutated` are the places of mutated inputs, each
    with the places of the inputs that its new value depends on.
    """

    def __init__(self, links: Sequence[frozenset[int]], mutated: Mapping[int, frozenset[int]]) -> None:
        self._links, self._mutated = links, mutated
        #: The same in all calls, and determined in the first call that passes no tensor twice.
        self._wiring: _Wiring | None = None

    def before(self, inputs: Sequence[Any]) -> list[Edge]:
        """The edges of the inputs of a call before they are mutated."""
        if self._wiring is not None and not self._mutated:
            return []
        return edges_of(inputs)

    def hook_backward(self, edges: Sequence[Edge], outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Registers a hook on the backward of a call with these inputs, their edges before it, and its outputs."""
        wiring = self._wiring
        if wiring is not None and not self._mutated:
            producer = _made_by(outputs[wiring.first])
            function: Any = None if producer is None else producer[0]
        else:
            made = [(_made_by(value), self._links[place]) for place, value in enumerate(outputs)]
            made += [(_mutated_by(inputs[place], edges[place]), link) for place, link in self._mutated.items()]
            first = next((at for at, (producer, _) in enumerate(made) if producer is not None), None)
            if first is None:
                return
            function = made[first][0][0]  # type: ignore[index]
            wiring = _Wiring.of(function, made, first, None if wiring is None else wiring.inputs, edges)
            if all(len(inputs_of_one) == 1 for inputs_of_one in wiring.inputs.values()):
                self._wiring = wiring  # A call that passes one tensor twice is ambiguous.
        if function is not None:
            function.register_hook(wiring.hook(function, inputs))


@final
@dataclass(frozen=True, slots=True)
class _Wiring:
    """How the results of a compiled function depend on its inputs, by the numbers that autograd gives to both."""

    #: The place of the first output that the function has made.
    first: int
    #: By the number of a gradient, the places of its input.
    inputs: dict[int, frozenset[int]]
    #: By the number of a result, the places of the inputs that it depends on.
    known: dict[int, frozenset[int]]
    #: Those of all other results: bases of views, and values copied into views, are results of the function too.
    hidden: frozenset[int]
    #: Whether every gradient is needed as soon as one result is used.
    is_dense: bool
    #: The numbers of gradients, each with the place of an input.
    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls,
        function: Any,
        made: Sequence[tuple[tuple[Any, int] | None, frozenset[int]]],
        first: int,
        inputs: dict[int, frozenset[int]] | None,
        edges: Sequence[Edge],
    ) -> _Wiring:
        inputs = _inputs_of(function, edges) if inputs is None else inputs
        hidden = frozenset[int]().union(
            *(link for producer, link in made if producer is None or producer[0] is not function)
        )
        known = {producer[1]: link for producer, link in made if producer is not None and producer[0] is function}
        links = [*known.values(), hidden] if hidden else list(known.values())
        is_dense = all(places & link for places in inputs.values() for link in links)
        pairs = tuple((at, place) for at, places in inputs.items() for place in places)
        return cls(first, inputs, known, hidden, is_dense, pairs)

    def hook(self, function: Any, inputs: Sequence[Any]) -> Callable[..., tuple[Any, ...] | None]:
        """What is called with the gradients that the function has computed, and those that it got."""
        hooks = _Hooks(function, inputs, self.pairs)

        def hook(gradients: Sequence[Any], used: Sequence[Any]) -> tuple[Any, ...] | None:
            if self.is_dense and used and used[0] is not None:
                return None
            numbers = (number for number, gradient in enumerate(used) if gradient is not None)
            needed = frozenset[int]().union(*(self.known.get(number, self.hidden) for number in numbers))
            return tuple(
                None if at in self.inputs and not self.inputs[at] & needed and not hooks.see(at) else gradient
                for at, gradient in enumerate(gradients)
            )

        return hook


@final
class _Hooks:
    """Which gradients of a compiled function hooks of the user get: these cannot take None.

    Eager mode does not call them for an unused gradient. A compiled function has computed zeros.
    """

    def __init__(self, function: Any, inputs: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> None:
        self._function = ref(function)
        self._inputs: dict[int, list[Any]] = {}
        self._hooked: set[int] = set()
        # The function leads to its leaves. This runs at every call, for all parameters of a layer.
        try:
            histories = [(at, inputs[place]) for at, place in pairs if not inputs[place].is_leaf]
        except RuntimeError:  # Autograd refuses to return the `grad_fn` of some views.
            histories = [(at, inputs[place]) for at, place in pairs if not is_leaf(inputs[place])]
        for at, tensor in histories:
            self._inputs.setdefault(at, []).append(ref(tensor))
            if tensor._backward_hooks:
                self._hooked.add(at)

    def see(self, at: int) -> bool:
        """Whether a hook gets the gradient with this number."""
        if at in self._hooked:
            return True
        function = self._function()
        tensors = [held() for held in self._inputs.get(at, ())]
        if any(tensor is not None and _has_hooks(tensor) for tensor in tensors):
            return True
        return function is not None and leads_to_hook(function.next_functions[at][0])


def leads_to_hook(function: Any) -> bool:
    """Whether a gradient of nothing for this function would reach a hook on a leaf.

    Functions of torch pass it on. Compiled ones do not, so that what is before them does not count.
    """
    seen, waiting = {function}, [function]
    while waiting:
        one = waiting.pop()
        leaf = getattr(one, "variable", None)
        if leaf is not None and _has_hooks(leaf):
            return True
        if one is None or one.name() == "CompiledFunctionBackward":
            continue
        new = [before for before, _ in one.next_functions if before not in seen]
        seen.update(new)
        waiting += new
    return False


def _has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def is_leaf(value: Tensor) -> bool | None:
    """Whether a tensor is a leaf; None where autograd refuses to return its `grad_fn`."""
    try:
        return value.is_leaf
    except RuntimeError:
        return None


def _made_by(value: Any) -> tuple[Any, int] | None:
    """The compiled function that returned a value, and the number of the result."""
    if isinstance(value, Tensor) and isinstance(value.grad_fn, BackwardCFunction):
        return value.grad_fn, value.output_nr
    return None


def _mutated_by(value: Tensor, before: Edge) -> tuple[Any, int] | None:
    """The compiled function that returned what was copied into `value`, and the number of the result."""
    copying = value.grad_fn if has_history(value) else None
    if copying is None or copying is before[0] or not copying.next_functions:
        return None
    # A copy into a view is recorded for its base, from which the history of the view then begins.
    base: Any = copying.next_functions[0][0]
    copying = base if base is not None and base.name().endswith("CopySlices") else copying
    function, number = copying.next_functions[-1]
    return (function, number) if isinstance(function, BackwardCFunction) else None


def _inputs_of(function: Any, edges: Sequence[Edge]) -> dict[int, frozenset[int]]:
    """For each gradient that `function` computes, the places of its input; one tensor may be passed twice."""
    known: dict[tuple[int, int], set[int]] = {}
    for place, (history, number) in enumerate(edges):
        if history is not None:
            known.setdefault((id(history), number), set()).add(place)
    found: dict[int, frozenset[int]] = {}
    for at, (before, number) in enumerate(function.next_functions):
        target = getattr(before, "variable", None)
        places = known.get((id(before if target is None else target), number))
        if places is not None:
            found[at] = frozenset(places)
    return found
