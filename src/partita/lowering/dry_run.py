"""Running the body on fakes: outputs, aliasing, copies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.operators.schemas import storage_key
from partita.errors import BackendError, ModeError
from partita.lowering._torch.containers import LEAF, Container, Fixed, Shape, assembled, has_tensors, items_of, shape_of
from partita.lowering._torch.dry_run import BodyRun, run_on_fakes
from partita.lowering._torch.gradients import (
    NoGradView,
    autograd_base,
    has_history,
    history_of,
    is_locked_view,
    links_of,
    no_grad_views,
)
from partita.lowering._torch.views import Reading, numbers_for, readable_from, views_module
from partita.program.body_effects import EffectfulNodes

__all__ = ["DryRun", "copy_of", "dry_run", "memory_of", "owned_places", "places_to_copy"]


# A rehearsal: the body is run on fake inputs, to see what it gives, before a compiler gets it.


log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class DryRun:
    """What a rehearsal has shown.

    `output` is how the output is made up of leaves, and `sources` tell where each leaf is: among what compiled code
    gives, behind that among the views, behind those among the inputs. Compiled code gives what `compiled` reads, each
    the name of a node and the keys by which a leaf is read from its result; `tensors` are the places of tensors among
    them, and `owned` of those that share memory with nothing. No gradient flows to the inputs at the places in
    `detached`.
    """

    output: Shape
    sources: tuple[int, ...]
    compiled: tuple[tuple[str, tuple[Any, ...]], ...]
    owned: tuple[int, ...]
    detached: tuple[int, ...]
    tensors: tuple[int, ...] = ()
    #: For each thing that compiled code gives, the inputs that its gradient flows to; empty if there is none.
    links: tuple[frozenset[int], ...] = ()
    #: The places of what somebody writes to later, while compiled code may want it for its backward, and of inputs.
    written_later: tuple[int, ...] = ()
    copied_inputs: tuple[int, ...] = ()
    #: The places of inputs that are written, each with the inputs that the gradient of its new value flows to.
    written_links: tuple[tuple[int, frozenset[int]], ...] = ()
    #: Views that are made under `no_grad` inside of an operator or a module, among what compiled code gives.
    no_grad_views: tuple[NoGradView, ...] = ()
    #: Gives the views for the inputs and then for what compiled code gives at the places in `bases`.
    views: GraphModule | None = None
    bases: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether compiled code gives the output itself, for the inputs as they are."""
        plain = Container(tuple, (LEAF,) * len(self.compiled))
        is_whole = self.output == plain and self.sources == tuple(range(len(self.compiled)))
        return is_whole and not (self.detached or self.copied_inputs or self.no_grad_views)

    def assembled(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """The output of the body, when compiled code gave `outputs` for `inputs`."""
        views = () if self.views is None else self.views(*inputs, *(outputs[place] for place in self.bases))
        known = (*outputs, *views, *inputs)
        return assembled(self.output, iter([known[source] for source in self.sources]))


def dry_run(
    body: GraphModule, inputs: Sequence[Any], mode: Any, acts: EffectfulNodes, *, has_gradients: bool
) -> DryRun | None:
    """What `body` shows on fake inputs, which it may change; None where it cannot run on them.

    Where gradients are off, all inputs ask for them, and none may get one.
    """
    histories = history_of(inputs)
    try:
        run = run_on_fakes(body, inputs, mode)
    except Exception as error:
        log.debug("what the body gives cannot be told: %s", error)
        return None
    if run.switched_gradients:
        raise ModeError("a module in it leaves gradients switched, which compiled code would not do")
    sorting = _Sorting(body, inputs, run, acts)
    if not has_gradients:
        sorting.check_that_gradients_are_off()
        histories = [None] * len(inputs)
    else:
        sorting.check_that_detached_inputs_get_no_gradients()
    return sorting.findings(histories)


class _Leaf(NamedTuple):
    """A leaf of the output: its value, the node that gives it, and the keys by which it is read there."""

    value: Any
    node: Node
    keys: tuple[Any, ...]


@final
class _Sorting:
    """Where each leaf comes from."""

    def __init__(self, body: GraphModule, inputs: Sequence[Any], run: BodyRun, acts: EffectfulNodes) -> None:
        self.body, self.inputs, self.run, self.results, self.acts = body, inputs, run, run.results, acts
        (output,) = body.graph.find_nodes(op="output")
        self.shape = shape_of(run.results[output], is_output=True)
        self.leaves = list(_leaves(output.args[0], run.results[output], self.shape))
        self.bases = self._found_bases()
        roots = [*body.graph.find_nodes(op="placeholder"), *(base.node for base in self.bases)]
        self.readable = readable_from(roots, run, lambda node: node.name not in acts.acting)
        self.compiled: list[_Leaf] = list(self.bases)
        self.views: list[Reading] = []

    def findings(self, histories: Sequence[Any]) -> DryRun:
        homes = [self._home(leaf) for leaf in self.leaves]
        self._keep_draws()
        numbers = [_Leaf(self.results[node], node, ()) for node in numbers_for(self.readable, self.views)]
        bases = (*range(len(self.bases)), *range(len(self.compiled), len(self.compiled) + len(numbers)))
        self.compiled += numbers
        starts = {"compiled": 0, "view": len(self.compiled), "input": len(self.compiled) + len(self.views)}
        values = [leaf.value for leaf in self.compiled]
        links = links_of(histories, values)
        changed = self._changed(histories)
        written = links_of(histories, [self.inputs[place] for place in changed])
        names = (node.name for node in self.body.graph.find_nodes(op="placeholder"))
        given = dict(zip(names, self.inputs, strict=True))
        copies = places_of_copies(given, values, self.acts.written_later) if any((*links, *written)) else ()
        return DryRun(
            output=self.shape,
            sources=tuple(starts[kind] + place for kind, place in homes),
            compiled=tuple((leaf.node.name, leaf.keys) for leaf in self.compiled),
            owned=owned_places(self.inputs, values),
            detached=_unreached(histories, (*links, *written)),
            tensors=tuple(place for place, value in enumerate(values) if isinstance(value, Tensor)),
            links=links,
            written_later=tuple(self._written_later()) if any(links) else (),
            copied_inputs=tuple(copies),
            written_links=tuple((place, link) for place, link in zip(changed, written, strict=True) if link),
            no_grad_views=no_grad_views(histories, values),
            views=views_module(self.readable, self.views) if self.views else None,
            bases=bases,
        )

    def check_that_gradients_are_off(self) -> None:
        """Raises where something in the body switches gradients on: compiled code has them everywhere or nowhere."""
        for leaf in self.leaves:
            if isinstance(leaf.value, Tensor) and has_history(leaf.value):
                raise ModeError(
                    f"gradients are off, but {leaf.node.name!r} gets some: something in it switches them on"
                )

    def check_that_detached_inputs_get_no_gradients(self) -> None:
        """Raises where a result is a detached input that got a history by a mutation: AOTAutograd loses it.

        So does `torch.compile` (2.13).
        """
        held, known = set(map(memory_of, self.inputs)), {id(autograd_base(value)) for value in self.inputs}
        for leaf in self.leaves:
            value = leaf.value
            if not isinstance(value, Tensor) or memory_of(value) not in held or id(autograd_base(value)) in known:
                continue
            if has_history(value) and value._version:
                raise BackendError(
                    f"{leaf.node.name!r} is a detached input that is mutated by what has gradients, and compiled code "
                    "would lose them; mutate a copy"
                )

    def _found_bases(self) -> list[_Leaf]:
        """The node that made each memory which several leaves share but no input: a compiler may tell them apart."""
        held = set(map(memory_of, self.inputs))
        sharing = Counter(memory_of(leaf.value) for leaf in self.leaves if isinstance(leaf.value, Tensor))
        wanted = {memory for memory, count in sharing.items() if count > 1 and memory not in held}
        found: dict[object, _Leaf] = {}
        for node, value in self.results.items() if wanted else ():
            if isinstance(value, Tensor) and memory_of(value) in wanted:
                found.setdefault(memory_of(value), _Leaf(value, node, ()))
        return list(found.values())

    def _changed(self, histories: Sequence[Any]) -> list[int]:
        """The places of inputs that have got another history by being written."""
        now = history_of(self.inputs)
        return [place for place, old in enumerate(histories) if now[place] is not old]

    def _home(self, leaf: _Leaf) -> tuple[str, int]:
        if isinstance(leaf.value, Tensor):
            for place, value in enumerate(self.inputs):
                if value is leaf.value:
                    return "input", place
            for place, known in enumerate(self.compiled):
                if known.value is leaf.value:
                    return "compiled", place
            reading = self.readable.reading_of(leaf.value)
            if reading is not None:
                self.views.append(reading)
                return "view", len(self.views) - 1
        self.compiled.append(leaf)
        return "compiled", len(self.compiled) - 1

    def _keep_draws(self) -> None:
        """Lets compiled code give what was drawn for nothing, unless an input holds it.

        A compiler leaves out a draw that no output shows, and the generator would not move on.
        """
        held, shown = set(map(memory_of, self.inputs)), self._shown()
        for node in self.body.graph.nodes:
            if node.name in self.acts.draws and node not in shown:
                value = self.results[node]
                drawn = _leaves(node, value, shape_of(value, is_output=True))
                self.compiled += [leaf for leaf in drawn if memory_of(leaf.value) not in held]

    def _written_later(self) -> Iterator[int]:
        held = {memory_of(self.results[node]) for node in self.results if node.name in self.acts.written_later}
        return (place for place, leaf in enumerate(self.compiled) if memory_of(leaf.value) in held)

    def _shown(self) -> set[Node]:
        """The nodes whose contents, and not only their sizes, show in an output; what is in a changed list may not."""
        found: set[Node] = set()
        waiting = [leaf.node for leaf in self.leaves if isinstance(leaf.value, Tensor)]
        while waiting:
            node = waiting.pop()
            if node not in found and has_tensors(self.results[node]) and not self.run.has_changed(node):
                found.add(node)
                waiting += node.all_input_nodes
        return found


def _unreached(histories: Sequence[Any], links: Sequence[frozenset[int]]) -> tuple[int, ...]:
    """The places of inputs that require a gradient but would get none."""
    reached = frozenset[int]().union(*links)
    return tuple(place for place, known in enumerate(histories) if known is not None and place not in reached)


def _leaves(argument: Any, value: Any, shape: Shape, keys: tuple[Any, ...] = ()) -> Iterator[_Leaf]:
    """The leaves of `value`, which is what `argument`, a node or a container of nodes, stands for."""
    if isinstance(shape, Container):
        for key, item in items_of(shape):
            is_node = isinstance(argument, Node)
            yield from _leaves(
                argument if is_node else argument[key], value[key], item, (*keys, key) if is_node else ()
            )
    elif not isinstance(shape, Fixed):
        yield _Leaf(value, argument, keys)


# Copied inputs: compiled code gets copies of what somebody writes to before the backward pass, which may want it.
#
# Inductor (torch 2.13) recomputes, so it keeps an input where plain torch keeps what was computed of it.


def places_of_copies(inputs: Mapping[str, Any], outputs: Iterable[Any], written_later: Collection[str]) -> list[int]:
    """The places of the inputs, by name, that are written later and that a copy can stand for.

    It cannot where compiled code gives a view of the input, nor where elements of the input share memory.
    """
    shown = set(map(memory_of, outputs))
    return [
        place
        for place, (name, value) in enumerate(inputs.items())
        if name in written_later and isinstance(value, Tensor) and memory_of(value) not in shown and _is_apart(value)
    ]


def _is_apart(value: Tensor) -> bool:
    """Whether no two elements of a tensor share memory."""
    reached = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True), key=lambda axis: axis[0]):
        if size > 1:
            if stride <= reached:
                return False
            reached += stride * (size - 1)
    return True


# Owned outputs: tensors that a body makes itself stay apart from its inputs and from each other when it is compiled.
#
# Inductor (torch 2.13) returns `x` itself for `torch.zeros(4) + x`, and one tensor twice for two equal expressions.
# In one graph that shows only at the end; between regions, a write to one of them would change the other.


def owned_places(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[int, ...]:
    """The places of outputs that share memory with no input and no other output."""
    holders = Counter(map(memory_of, (*inputs, *outputs)))
    return tuple(
        place for place, value in enumerate(outputs) if isinstance(value, Tensor) and holders[memory_of(value)] == 1
    )


def places_to_copy(inputs: Sequence[Any], outputs: Sequence[Any], owned: Sequence[int]) -> tuple[int, ...]:
    """The places among `owned` of outputs that share memory all the same.

    So does a view that was made inside of a compiled function, and autograd lets nobody write to one.
    """
    holders = Counter(map(memory_of, (*inputs, *outputs)))
    return tuple(place for place in owned if holders[memory_of(outputs[place])] > 1 or is_locked_view(outputs[place]))


def copy_of(value: Tensor) -> Tensor:
    """A copy with the same strides, through which gradients flow."""
    copied = value.clone()
    if copied.stride() == value.stride():
        return copied
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def memory_of(value: Any) -> object:
    """What two values have in common if they share memory."""
    return storage_key(value) if isinstance(value, Tensor) else object()
