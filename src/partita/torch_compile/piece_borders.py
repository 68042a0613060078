"""Borders of compiled pieces: which tensors are copied there, so that mutations work as in eager mode.

A compiled function may save any input for backward, also one that eager autograd does not save, and must not find it
mutated. So a piece that needs a backward runs on copies of what it mutates itself, and of what is mutated after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from partita._torch.tensors import version_of
from partita.lowering._torch.gradients import Edge, NoGradView, UnusedGradients, edges_of, links_between, no_grad_views
from partita.lowering.dry_run import copy_of, memory_of, outputs_to_copy, unaliased_outputs

#: What is passed to compiled code as it is.
_PLAIN = (Tensor, int, torch.SymInt)


class AliasedMutationError(Exception):
    """A piece mutates aliased memory, which copies cannot reproduce; the text says which."""


@final
@dataclass(frozen=True, slots=True)
class Border:
    """What happens around each call of a compiled piece, by positions of its arguments and outputs."""

    #: Arguments that are replaced by copies.
    copied: tuple[int, ...] = ()
    #: Arguments that it mutates: their new contents are its last outputs.
    mutated: tuple[int, ...] = ()
    #: Those of them that it mutates under `no_grad`.
    unrecorded: tuple[int, ...] = ()
    #: Outputs that are arguments themselves, which the compiled function does not return.
    returned_args: tuple[tuple[int, int], ...] = ()
    #: Outputs that are copied.
    copied_outputs: tuple[int, ...] = ()
    #: Outputs that are copied where they alias other tensors at run time.
    owned: tuple[int, ...] = ()
    #: Outputs that are views made under `no_grad`.
    no_grad_views: tuple[NoGradView, ...] = ()
    #: The arguments that the gradient of each output flows to; empty where that is unknown.
    links: tuple[frozenset[int], ...] = ()


@final
class Bordered(nn.Module):
    """Calls a compiled piece and makes the copies of its border."""

    def __init__(self, compiled: Callable[..., Sequence[Any]], border: Border) -> None:
        super().__init__()
        self.function: Callable[..., Sequence[Any]] = getattr(compiled, "function", compiled)
        self._border = border
        self._unused = UnusedGradients(border.links, {}) if any(border.links) else None

    def only_removes_gradients(self) -> bool:
        """Whether nothing is done but to remove the gradients of inputs that no used output depends on."""
        return self._border == Border(links=self._border.links)

    def forward(self, *args: Any) -> Sequence[Any]:
        border, inputs = self._border, list(args)
        for place in border.copied:
            inputs[place] = copy_of(inputs[place])
        outputs = self._run(inputs)
        for place in reversed(border.mutated):
            with torch.set_grad_enabled(torch.is_grad_enabled() and place not in border.unrecorded):
                args[place].copy_(outputs.pop())
        for place, source in border.returned_args:
            outputs.insert(place, args[source])
        for place in (*border.copied_outputs, *outputs_to_copy(args, outputs, border.owned)):
            outputs[place] = copy_of(outputs[place])
        for view in border.no_grad_views:
            outputs[view.place] = view.of(outputs[view.place])
        return outputs

    def _run(self, inputs: Sequence[Any]) -> list[Any]:
        if self._unused is None:
            return list(self.function(*inputs))
        edges = self._unused.before(inputs)
        outputs = list(self.function(*inputs))
        # A returned argument was computed by another piece.
        known = set(map(id, inputs))
        self._unused.hook_backward(edges, [None if id(value) in known else value for value in outputs], inputs)
        return outputs


def border_of_graph(gm: GraphModule) -> Border:
    """The border of Dynamo's graph if it is compiled whole, from its traced values in their final state."""
    args = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    returned = gm.graph.output_node().args[0]
    results = returned if isinstance(returned, tuple | list) else ()
    outputs = [node.meta.get("example_value") if isinstance(node, Node) else None for node in results]
    histories = (_grad_fn(arg) for arg in args if isinstance(arg, Tensor))
    return Border(no_grad_views=no_grad_views((*args, *histories), outputs))


@final
@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The version counter, autograd node and layout of a tensor at one time."""

    version: int | None
    grad_fn: object
    layout: object


def edges_before(args: Sequence[Any]) -> list[Edge]:
    """The gradient edges of the arguments before a run; empty where autograd does not report them."""
    try:
        return edges_of(args)
    except RuntimeError:
        return []


def snapshots_of(values: Iterable[Any]) -> tuple[_Snapshot | None, ...]:
    """The state of each value that a run may change; None for what is no tensor."""
    return tuple(_snapshot(value) if isinstance(value, Tensor) else None for value in values)


def may_overlap(one: Any, other: Any) -> bool:
    """Whether two values may have elements in common; False for views of one storage that are apart or interleaved."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or memory_of(one) != memory_of(other):
        return False
    if any(tensor.layout is not torch.strided for tensor in (one, other)) or one.dtype != other.dtype:
        return True
    strides = {*one.stride(), *other.stride()}
    if not all(isinstance(number, int) for number in (*strides, one.storage_offset(), other.storage_offset())):
        return True
    # Modulo the step of an outer dimension, the elements of each lie in a window; windows that are apart share none.
    return not any(_are_apart(_window(one, period), _window(other, period)) for period in (None, *strides))


def count_mutations(tensors: Sequence[Any], *, before: Sequence[_Snapshot | None]) -> None:
    """Raises the version counters of tensors that were mutated without that.

    The running statistics of a batch norm are, and what a custom operator mutates whose fake kernel does nothing.
    """
    for tensor, known in zip(tensors, before, strict=True):
        if known is not None and known.version is not None and version_of(tensor) == known.version:
            torch.autograd.graph.increment_version(tensor)


@final
@dataclass(frozen=True, slots=True)
class PieceCall:
    """The fake arguments and outputs of one piece after a run, with their state before and after it."""

    name: str
    args: tuple[Any, ...]
    outputs: tuple[Any, ...]
    before: tuple[_Snapshot | None, ...]
    after: tuple[_Snapshot | None, ...]
    #: Their state after run and compilation: tracing a body also bumps version counters.
    compiled: tuple[_Snapshot | None, ...]
    own: Border = Border()
    no_grad_views: tuple[NoGradView, ...] = ()
    links: tuple[frozenset[int], ...] = ()
    #: Whether it runs without grad mode and autocast, and switches no mode.
    is_modeless: bool = False
    #: Whether it leaves the modes of its caller as they are.
    keeps_modes: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        args: Sequence[Any],
        outputs: Sequence[Any],
        *,
        before: tuple[_Snapshot | None, ...],
        edges: Sequence[Edge],
        is_modeless: bool,
        keeps_modes: bool,
    ) -> PieceCall:
        after = snapshots_of((*args, *outputs))
        views = no_grad_views((*args, *(snapshot and snapshot.grad_fn for snapshot in before)), outputs)
        # A mutated tensor has another history, and one mutated behind autograd has more than one.
        links = () if _places_mutated(before, after[: len(args)]) else links_between(edges, outputs)
        links = links if any(links) else ()
        return cls(
            name,
            tuple(args),
            tuple(outputs),
            before,
            after,
            after,
            no_grad_views=views,
            links=links,
            is_modeless=is_modeless,
            keeps_modes=keeps_modes,
        )

    def now_compiled(self, own: Border) -> PieceCall:
        """The same, for a piece that was compiled after its run, with a border for its own mutations."""
        return replace(self, compiled=snapshots_of((*self.args, *self.outputs)), own=own)

    def is_pure(self) -> bool:
        """Whether a call computes outputs in new memory, without gradients, and does nothing else."""
        return self.is_modeless and not self._mutated() and not self.needs_backward() and self._has_own_memory()

    def is_trained(self) -> bool:
        """Whether a call computes outputs in new memory, gradients of which flow to all arguments that require one."""
        if not self.returns_only_new_memory() or not all(isinstance(arg, _PLAIN) for arg in self.args):
            return False
        return self._requiring() == frozenset[int]().union(*self.links) != frozenset()

    def has_one_gradient(self) -> bool:
        """Whether there is one output with a gradient, so that all gradients are needed where any is."""
        requiring = sum(isinstance(value, Tensor) and value.requires_grad for value in self.outputs)
        return requiring == sum(map(bool, self.links)) == 1

    def returns_only_new_memory(self) -> bool:
        """Whether a call computes outputs in new memory, gradients of which flow as autograd says, and does no more."""
        return self.keeps_modes and not self._mutated() and not self.no_grad_views and self._has_own_memory()

    def _requiring(self) -> frozenset[int]:
        tensors = ((place, arg) for place, arg in enumerate(self.args) if isinstance(arg, Tensor))
        return frozenset(place for place, arg in tensors if arg.requires_grad)

    def _has_own_memory(self) -> bool:
        tensors = [place for place, value in enumerate(self.outputs) if isinstance(value, Tensor)]
        return unaliased_outputs(self.args, self.outputs) == tuple(tensors)

    def own_mutations(self, *, read_once: Collection[int]) -> Border:
        """The border for arguments that the piece itself mutates; those at `read_once` have no other reader."""
        places = self._mutated()
        holders = Counter(map(memory_of, self.args))
        for place in places:
            if holders[memory_of(self.args[place])] > 1:
                raise AliasedMutationError(f"mutates argument {place}, which shares memory with another")
        unrecorded = [place for place in places if not self._is_recorded(place)]
        alone = set(unrecorded).intersection(read_once if self.needs_backward() else places)
        mutated = tuple(place for place in places if place not in alone)
        for place in mutated:
            self._check_unaliased(place)
        sources = {id(self.args[place]): place for place in mutated}
        returned = tuple((at, sources[id(value)]) for at, value in enumerate(self.outputs) if id(value) in sources)
        return Border(mutated, mutated, tuple(place for place in unrecorded if place in mutated), returned)

    def whole_border(self) -> Border:
        """The whole border, also for outputs and for what is mutated after the piece; for when all pieces have run."""
        own, later = replace(self.own, no_grad_views=self.no_grad_views, links=self.links), self._mutated_later()
        if not later:
            return own
        own = replace(own, owned=unaliased_outputs(self.args, self.outputs))
        if not self.needs_backward():
            return own
        values, count = (*self.args, *self.outputs), len(self.args)
        # What a piece mutates itself must be the argument, or is a copy already.
        settled = {*self._mutated(), *(count + place for place, _ in own.returned_args)}
        holders = Counter(map(memory_of, values))
        places = [place for place in later if place not in settled]
        for place in places:
            if holders[memory_of(values[place])] > 1 or _is_expanded(values[place]):
                raise AliasedMutationError("has inputs or outputs that alias each other, and later nodes mutate them")
        copied = (*own.copied, *(place for place in places if place < count))
        outputs = tuple(place - count for place in places if place >= count)
        return replace(own, copied=copied, copied_outputs=outputs)

    def _mutated(self) -> list[int]:
        """The positions of arguments that the piece has mutated."""
        return _places_mutated(self.before, self.after[: len(self.args)])

    def _is_recorded(self, place: int) -> bool:
        """Whether autograd has recorded the mutation of an argument: not under `no_grad`."""
        old, new = self.before[place], self.after[place]
        return old is not None and new is not None and old.grad_fn is not new.grad_fn

    def _check_unaliased(self, place: int) -> None:
        old, new, value = self.before[place], self.after[place], self.args[place]
        assert old is not None
        assert new is not None
        if old.layout != new.layout:
            raise AliasedMutationError(f"changes the shape of argument {place} in place")
        if _is_expanded(value):
            raise AliasedMutationError(f"mutates argument {place}, elements of which share memory")
        if any(output is not value and memory_of(output) == memory_of(value) for output in self.outputs):
            raise AliasedMutationError(f"mutates argument {place} and returns a view of it")

    def _mutated_later(self) -> list[int]:
        """The positions, in arguments and then outputs, of what was mutated after run and compilation."""
        return _places_mutated(self.compiled, snapshots_of((*self.args, *self.outputs)))

    def needs_backward(self) -> bool:
        """Whether there is a backward for which the piece saves tensors."""
        computed = (value for value in self.outputs if not any(value is arg for arg in self.args))
        return any(isinstance(value, Tensor) and value.requires_grad for value in computed) or any(
            self._is_recorded(place) for place in range(len(self.args))
        )


def _snapshot(tensor: Tensor) -> _Snapshot:
    is_strided = tensor.layout is torch.strided
    layout = (tensor.shape, tensor.stride(), tensor.storage_offset()) if is_strided else tensor.shape
    return _Snapshot(version_of(tensor), _grad_fn(tensor), layout)


def _window(tensor: Tensor, period: int | None) -> tuple[int, int] | None:
    """Where the elements begin and end modulo `period`; None if that is unknown or they go round."""
    if period == 0:
        return None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    inner = [(size, stride) for size, stride in steps if period is None or stride % period]
    if not all(isinstance(size, int) for size, _ in inner):
        return None
    offset = int(tensor.storage_offset())
    begin = offset if period is None else offset % period
    end = begin + sum((size - 1) * stride for size, stride in inner) + 1
    return None if period is not None and end > period else (begin, end)


def _are_apart(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    return one is not None and other is not None and (one[1] <= other[0] or other[1] <= one[0])


def _grad_fn(tensor: Tensor) -> object:
    try:
        return tensor.grad_fn
    except RuntimeError:  # Autograd raises for views of a multi-output call after a mutation.
        return None


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory; symbolic strides are never zero."""
    return tensor.layout is torch.strided and any(isinstance(stride, int) and stride == 0 for stride in tensor.stride())


def _places_mutated(old: Sequence[_Snapshot | None], new: Sequence[_Snapshot | None]) -> list[int]:
    pairs = enumerate(zip(old, new, strict=True))
    return [
        place for place, (one, other) in pairs if one is not None and other is not None and one.version != other.version
    ]
