"""Borders of pieces: what is copied there, so that memory which crosses one can be written as in plain torch.

A compiled function saves for its backward what suits it, also an input that plain torch does not save, and must not
find it changed. So a piece that trains works on copies of what it writes itself, and of what is written after it.
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
from partita.lowering.dry_run import copy_of, memory_of, owned_places, places_to_copy

__all__ = ["Border", "Bordered", "PieceCall", "SharedMemoryError", "border_of_graph", "edges_before", "look_at"]


class SharedMemoryError(Exception):
    """A piece shares memory that is written, so that no copy can stand for it; the text says which."""


@final
@dataclass(frozen=True, slots=True)
class Border:
    """What happens around each call of a compiled piece, by the places of its arguments and outputs."""

    #: Arguments of which it gets copies.
    copied: tuple[int, ...] = ()
    #: Arguments that it writes: their new contents are its last outputs.
    written: tuple[int, ...] = ()
    #: Those of them that it writes in blocks without gradients.
    unrecorded: tuple[int, ...] = ()
    #: Outputs that are arguments themselves, which it does not give.
    handed_back: tuple[tuple[int, int], ...] = ()
    #: Outputs that are copied.
    copied_outputs: tuple[int, ...] = ()
    #: Outputs that are copied where they turn out to share memory.
    owned: tuple[int, ...] = ()
    #: Outputs that are views made under `no_grad`.
    no_grad_views: tuple[NoGradView, ...] = ()
    #: The arguments that the gradient of each output flows to; none where that is not known.
    links: tuple[frozenset[int], ...] = ()


@final
class Bordered(nn.Module):
    """Calls a compiled piece and does what its border asks for."""

    def __init__(self, compiled: Callable[..., Sequence[Any]], border: Border) -> None:
        super().__init__()
        self._compiled = compiled
        self._border = border
        self._unused = UnusedGradients(border.links, {}) if any(border.links) else None

    def forward(self, *args: Any) -> Sequence[Any]:
        border, given = self._border, list(args)
        for place in border.copied:
            given[place] = copy_of(given[place])
        outputs = self._run(given)
        for place in reversed(border.written):
            with torch.set_grad_enabled(torch.is_grad_enabled() and place not in border.unrecorded):
                args[place].copy_(outputs.pop())
        for place, source in border.handed_back:
            outputs.insert(place, args[source])
        for place in (*border.copied_outputs, *places_to_copy(args, outputs, border.owned)):
            outputs[place] = copy_of(outputs[place])
        for view in border.no_grad_views:
            outputs[view.place] = view.of(outputs[view.place])
        return outputs

    def _run(self, given: Sequence[Any]) -> list[Any]:
        if self._unused is None:
            return list(self._compiled(*given))
        edges = self._unused.before(given)
        outputs = list(self._compiled(*given))
        # An argument that comes out again was made by another piece.
        known = set(map(id, given))
        self._unused.watch(edges, [None if id(value) in known else value for value in outputs], given)
        return outputs


def border_of_graph(gm: GraphModule) -> Border:
    """What Dynamo's graph needs if it is compiled whole, by its traced values, which are as the end of it left them."""
    args = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    given = gm.graph.output_node().args[0]
    results = given if isinstance(given, tuple | list) else ()
    outputs = [node.meta.get("example_value") if isinstance(node, Node) else None for node in results]
    histories = (_grad_fn(arg) for arg in args if isinstance(arg, Tensor))
    return Border(no_grad_views=no_grad_views((*args, *histories), outputs))


@final
@dataclass(frozen=True, slots=True)
class _Look:
    """How often a tensor was written, and by what its gradient flows."""

    version: int | None
    grad_fn: object
    layout: object


def edges_before(args: Sequence[Any]) -> list[Edge]:
    """Where the gradients of the arguments flow on to, before a run; none where autograd does not tell."""
    try:
        return edges_of(args)
    except RuntimeError:
        return []


def look_at(values: Iterable[Any]) -> tuple[_Look | None, ...]:
    """What a run may change in each value; nothing in what is no tensor."""
    return tuple(_look(value) if isinstance(value, Tensor) else None for value in values)


@final
@dataclass(frozen=True, slots=True)
class PieceCall:
    """The fake arguments and outputs of one piece, which has just run, with how they looked before and look now."""

    name: str
    args: tuple[Any, ...]
    outputs: tuple[Any, ...]
    before: tuple[_Look | None, ...]
    after: tuple[_Look | None, ...]
    #: How they looked when both the run and the compilation were done: a trace of a body also counts as writing.
    compiled: tuple[_Look | None, ...]
    own: Border = Border()
    no_grad_views: tuple[NoGradView, ...] = ()
    links: tuple[frozenset[int], ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        args: Sequence[Any],
        outputs: Sequence[Any],
        *,
        before: tuple[_Look | None, ...],
        edges: Sequence[Edge],
    ) -> PieceCall:
        after = look_at((*args, *outputs))
        views = no_grad_views((*args, *(look and look.grad_fn for look in before)), outputs)
        # What was written has another history, and what is written past autograd has more than one.
        links = () if _places_written(before, after[: len(args)]) else links_between(edges, outputs)
        return cls(name, tuple(args), tuple(outputs), before, after, after, no_grad_views=views, links=links)

    def now_compiled(self, own: Border) -> PieceCall:
        """The same, for a piece that was compiled after its run, with a border because of its own writes."""
        return replace(self, compiled=look_at((*self.args, *self.outputs)), own=own)

    def own_writes(self, *, seen_once: Collection[int]) -> Border:
        """What is needed because the piece itself writes to arguments; at `seen_once` only the writer sees them."""
        places = self._written()
        holders = Counter(map(memory_of, self.args))
        for place in places:
            if holders[memory_of(self.args[place])] > 1:
                raise SharedMemoryError(f"writes to argument {place}, which shares memory with another")
        unrecorded = [place for place in places if not self._is_recorded(place)]
        alone = set(unrecorded).intersection(seen_once if self._trains() else places)
        written = tuple(place for place in places if place not in alone)
        for place in written:
            self._check_stands_alone(place)
        sources = {id(self.args[place]): place for place in written}
        handed_back = tuple((at, sources[id(value)]) for at, value in enumerate(self.outputs) if id(value) in sources)
        return Border(written, written, tuple(place for place in unrecorded if place in written), handed_back)

    def whole_border(self) -> Border:
        """With what its outputs are, and what is written after the piece, once that has run."""
        own, later = replace(self.own, no_grad_views=self.no_grad_views, links=self.links), self._written_later()
        if not later:
            return own
        own = replace(own, owned=owned_places(self.args, self.outputs))
        if not self._trains():
            return own
        values, count = (*self.args, *self.outputs), len(self.args)
        # What a piece writes itself must be what it was given, or is a copy already.
        settled = {*self._written(), *(count + place for place, _ in own.handed_back)}
        holders = Counter(map(memory_of, values))
        places = [place for place in later if place not in settled]
        for place in places:
            if holders[memory_of(values[place])] > 1 or _is_expanded(values[place]):
                raise SharedMemoryError("gives or takes tensors that share memory, and later nodes write to them")
        copied = (*own.copied, *(place for place in places if place < count))
        outputs = tuple(place - count for place in places if place >= count)
        return replace(own, copied=copied, copied_outputs=outputs)

    def _written(self) -> list[int]:
        """The places of arguments that the piece has written."""
        return _places_written(self.before, self.after[: len(self.args)])

    def _is_recorded(self, place: int) -> bool:
        """Whether autograd knows of a write to an argument: not in a block without gradients."""
        old, new = self.before[place], self.after[place]
        return old is not None and new is not None and old.grad_fn is not new.grad_fn

    def _check_stands_alone(self, place: int) -> None:
        old, new, value = self.before[place], self.after[place], self.args[place]
        assert old is not None
        assert new is not None
        if old.layout != new.layout:
            raise SharedMemoryError(f"changes the shape of argument {place} in place")
        if _is_expanded(value):
            raise SharedMemoryError(f"writes to argument {place}, elements of which share memory")
        if any(output is not value and memory_of(output) == memory_of(value) for output in self.outputs):
            raise SharedMemoryError(f"writes to argument {place} and gives a view of it")

    def _written_later(self) -> list[int]:
        """The places, in arguments and then outputs, that were written since the piece had run and was compiled."""
        return _places_written(self.compiled, look_at((*self.args, *self.outputs)))

    def _trains(self) -> bool:
        """Whether there is a backward for which the piece saves tensors."""
        made = (value for value in self.outputs if not any(value is arg for arg in self.args))
        return any(isinstance(value, Tensor) and value.requires_grad for value in made) or any(
            self._is_recorded(place) for place in range(len(self.args))
        )


def _look(tensor: Tensor) -> _Look:
    is_strided = tensor.layout is torch.strided
    layout = (tensor.shape, tensor.stride(), tensor.storage_offset()) if is_strided else tensor.shape
    return _Look(version_of(tensor), _grad_fn(tensor), layout)


def _grad_fn(tensor: Tensor) -> object:
    try:
        return tensor.grad_fn
    except RuntimeError:  # Autograd does not tell: one of several views that came from one call was written.
        return None


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory; symbolic strides are never zero."""
    return tensor.layout is torch.strided and any(isinstance(stride, int) and stride == 0 for stride in tensor.stride())


def _places_written(old: Sequence[_Look | None], new: Sequence[_Look | None]) -> list[int]:
    pairs = enumerate(zip(old, new, strict=True))
    return [
        place for place, (one, other) in pairs if one is not None and other is not None and one.version != other.version
    ]
