"""Dry run of a body under fake tensors: determines output structure, aliasing and gradients before compilation."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.operator_schemas import storage_key
from partita._torch.tensors import may_repeat_elements
from partita.analysis.effects.terms import PURE, Effects
from partita.errors import BackendError, ModeError
from partita.lowering._torch.containers import LEAF, Container, Fixed, Shape, assembled, has_tensors, items_of, shape_of
from partita.lowering._torch.dry_run import (
    BodyRun,
    InvalidCallError,
    Reading,
    numbers_for,
    readable_from,
    run_on_fakes,
    views_module,
)
from partita.lowering._torch.gradients import (
    NoGradView,
    autograd_base,
    has_history,
    history_of,
    is_locked_view,
    links_of,
    no_grad_views,
)

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class DryRun:
    """How the output of a body follows from the outputs of compiled code.

    `output` is the container structure of the output, and `sources` are the places of its leaves among the compiled
    outputs, the views and the inputs, counted in this order. Compiled code returns what `compiled` lists, each the name
    of a node and the keys by which a leaf is read from its result; `tensors` are the places of tensors among them, and
    `unaliased` of those that share memory with nothing. No gradient flows to the inputs at the places in `detached`.
    """

    output: Shape
    sources: tuple[int, ...]
    compiled: tuple[tuple[str, tuple[Any, ...]], ...]
    unaliased: tuple[int, ...]
    detached: tuple[int, ...]
    tensors: tuple[int, ...] = ()
    #: For each compiled output, the inputs that its gradient flows to.
    links: tuple[frozenset[int], ...] = ()
    #: The places of compiled outputs, and of inputs, that are mutated later while they may be saved for backward.
    mutated_later: tuple[int, ...] = ()
    copied_inputs: tuple[int, ...] = ()
    #: The places of inputs that are mutated, each with the inputs that the gradient of its new value flows to.
    mutated_links: tuple[tuple[int, frozenset[int]], ...] = ()
    #: The compiled outputs that are views made under `no_grad` inside of an operator or a module.
    no_grad_views: tuple[NoGradView, ...] = ()
    #: The nodes that mutate a tensor, and would compute a new one with other strides where nothing is mutated.
    loses_strides: frozenset[str] = frozenset()
    #: Computes the views from the inputs and the compiled outputs at the places in `bases`.
    views: GraphModule | None = None
    bases: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether compiled code takes the inputs and returns the output unchanged."""
        plain = Container(tuple, (LEAF,) * len(self.compiled))
        is_whole = self.output == plain and self.sources == tuple(range(len(self.compiled)))
        return is_whole and not (self.detached or self.copied_inputs or self.no_grad_views)

    def assembled(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """The output of the body, where compiled code returned `outputs` for `inputs`."""
        views = () if self.views is None else self.views(*inputs, *(outputs[place] for place in self.bases))
        known = (*outputs, *views, *inputs)
        return assembled(self.output, iter([known[source] for source in self.sources]))


def dry_run(
    body: GraphModule,
    inputs: Sequence[Any],
    mode: Any,
    *,
    effects: Mapping[str, Effects],
    mutated_later: Collection[str],
    has_gradients: bool,
) -> DryRun | None:
    """The dry run of `body` on fake inputs, which it may mutate; None where an operator cannot run on fake tensors.

    `effects` are those of its nodes, and `mutated_later` the nodes that are mutated after it has run, by name. Where
    gradients are disabled, the inputs require them nevertheless, and no output may have a `grad_fn`.
    """
    histories = history_of(inputs)
    try:
        run = run_on_fakes(body, inputs, mode, effects)
    except InvalidCallError:
        raise  # Compiled code might do something where eager mode raises.
    except Exception as error:
        log.debug("the dry run of a body failed: %s", error)
        return None
    if run.switched_gradients:
        raise ModeError("a module in it leaves gradients switched, which compiled code would not do")
    if run.moves is not None:
        raise BackendError(f"{run.moves!r} gives a tensor other memory, which compiled code would not do")
    analysis = _OutputAnalysis(body, inputs, run, effects, mutated_later)
    if not has_gradients:
        analysis.check_that_gradients_are_off()
        histories = [None] * len(inputs)
    else:
        analysis.check_that_detached_inputs_get_no_gradients()
    return analysis.result(histories)


class _Leaf(NamedTuple):
    """A leaf of the output: its value, the node that computes it, and the keys by which it is read from its result."""

    value: Any
    node: Node
    keys: tuple[Any, ...]


@final
class _OutputAnalysis:
    """Determines the source of each leaf: a compiled output, a view, or an input."""

    def __init__(
        self,
        body: GraphModule,
        inputs: Sequence[Any],
        run: BodyRun,
        effects: Mapping[str, Effects],
        mutated_later: Collection[str],
    ) -> None:
        self.body, self.inputs, self.run, self.results = body, inputs, run, run.results
        self.effects, self.mutated_later = effects, mutated_later
        (output,) = body.graph.find_nodes(op="output")
        self.shape = shape_of(run.results[output], is_output=True)
        self.leaves = list(_leaves(output.args[0], run.results[output], self.shape))
        self.bases = self._found_bases()
        roots = [*body.graph.find_nodes(op="placeholder"), *(base.node for base in self.bases)]
        self.readable = readable_from(roots, run, lambda node: node.name not in effects)
        self.compiled: list[_Leaf] = list(self.bases)
        self.views: list[Reading] = []

    def result(self, histories: Sequence[Any]) -> DryRun:
        sources = [self._source_of(leaf) for leaf in self.leaves]
        self._keep_unused_rng()
        numbers = [_Leaf(self.results[node], node, ()) for node in numbers_for(self.readable, self.views)]
        bases = (*range(len(self.bases)), *range(len(self.compiled), len(self.compiled) + len(numbers)))
        self.compiled += numbers
        starts = {"compiled": 0, "view": len(self.compiled), "input": len(self.compiled) + len(self.views)}
        values = [leaf.value for leaf in self.compiled]
        links = links_of(histories, values)
        changed = self._mutated_inputs(histories)
        mutated = links_of(histories, [self.inputs[place] for place in changed])
        reached = frozenset[int]().union(*links, *mutated)
        names = (node.name for node in self.body.graph.find_nodes(op="placeholder"))
        named_inputs = dict(zip(names, self.inputs, strict=True))
        copies = inputs_to_copy(named_inputs, values, self.mutated_later) if any((*links, *mutated)) else ()
        return DryRun(
            output=self.shape,
            sources=tuple(starts[origin] + place for origin, place in sources),
            compiled=tuple((leaf.node.name, leaf.keys) for leaf in self.compiled),
            unaliased=unaliased_outputs(self.inputs, values),
            detached=tuple(at for at, known in enumerate(histories) if known is not None and at not in reached),
            tensors=tuple(place for place, value in enumerate(values) if isinstance(value, Tensor)),
            links=links,
            mutated_later=tuple(self._mutated_later()) if any(links) else (),
            copied_inputs=tuple(copies),
            mutated_links=tuple((place, link) for place, link in zip(changed, mutated, strict=True) if link),
            no_grad_views=no_grad_views(histories, values),
            loses_strides=self.run.loses_strides,
            views=views_module(self.readable, self.views) if self.views else None,
            bases=bases,
        )

    def check_that_gradients_are_off(self) -> None:
        """Raises where the body enables gradients itself: compiled code has them everywhere or nowhere."""
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
        """The nodes that allocated memory which several leaves, but no input, share: a compiler may separate them."""
        held = set(map(memory_of, self.inputs))
        sharing = Counter(memory_of(leaf.value) for leaf in self.leaves if isinstance(leaf.value, Tensor))
        wanted = {memory for memory, count in sharing.items() if count > 1 and memory not in held}
        found: dict[object, _Leaf] = {}
        for node, value in self.results.items() if wanted else ():
            if isinstance(value, Tensor) and memory_of(value) in wanted:
                found.setdefault(memory_of(value), _Leaf(value, node, ()))
        return list(found.values())

    def _mutated_inputs(self, histories: Sequence[Any]) -> list[int]:
        """The places of inputs whose `grad_fn` has changed by mutation."""
        now = history_of(self.inputs)
        return [place for place, old in enumerate(histories) if now[place] is not old]

    def _source_of(self, leaf: _Leaf) -> tuple[str, int]:
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

    def _keep_unused_rng(self) -> None:
        """Makes unused random numbers outputs of the compiled code, unless they are in the memory of an input.

        A compiler eliminates random operators whose results are dead, and the RNG state would not advance.
        """
        held, visible = set(map(memory_of, self.inputs)), self._visible_nodes()
        for node in self.body.graph.nodes:
            if self.effects.get(node.name, PURE).uses_rng and node not in visible:
                value = self.results[node]
                random_leaves = _leaves(node, value, shape_of(value, is_output=True))
                self.compiled += [leaf for leaf in random_leaves if memory_of(leaf.value) not in held]

    def _mutated_later(self) -> Iterator[int]:
        held = {memory_of(self.results[node]) for node in self.results if node.name in self.mutated_later}
        return (place for place, leaf in enumerate(self.compiled) if memory_of(leaf.value) in held)

    def _visible_nodes(self) -> set[Node]:
        """The nodes that outputs depend on by value, not by size alone; items of mutated lists are excluded."""
        found: set[Node] = set()
        waiting = [leaf.node for leaf in self.leaves if isinstance(leaf.value, Tensor)]
        while waiting:
            node = waiting.pop()
            if node not in found and has_tensors(self.results[node]) and not self.run.has_changed(node):
                found.add(node)
                waiting += node.all_input_nodes
        return found


def _leaves(argument: Any, value: Any, shape: Shape, keys: tuple[Any, ...] = ()) -> Iterator[_Leaf]:
    """The leaves of `value`, the result of `argument`, a node or a container of nodes."""
    if isinstance(shape, Container):
        for key, item in items_of(shape):
            is_node = isinstance(argument, Node)
            yield from _leaves(
                argument if is_node else argument[key], value[key], item, (*keys, key) if is_node else ()
            )
    elif not isinstance(shape, Fixed):
        yield _Leaf(value, argument, keys)


def inputs_to_copy(inputs: Mapping[str, Any], outputs: Iterable[Any], mutated_later: Collection[str]) -> list[int]:
    """The places of inputs of which compiled code gets copies, since they are mutated before the backward pass.

    Inductor (torch 2.13) recomputes, so it saves an input for backward where eager mode saves what was computed from
    it. An input cannot be copied where an output is a view of it, nor where its own elements overlap.
    """
    aliased = set(map(memory_of, outputs))
    return [
        place
        for place, (name, value) in enumerate(inputs.items())
        if name in mutated_later
        and isinstance(value, Tensor)
        and memory_of(value) not in aliased
        and not may_repeat_elements(value.shape, value.stride())
    ]


# Outputs without aliases in the body must have none when it is compiled. Inductor (torch 2.13) returns `x` itself for
# `torch.zeros(4) + x`, and one tensor twice for two equal expressions. Within one graph that is harmless; between
# regions, a mutation of one of them would change the other.


def unaliased_outputs(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[int, ...]:
    """The places of outputs that share memory with no input and no other output."""
    holders = Counter(map(memory_of, (*inputs, *outputs)))
    return tuple(
        place for place, value in enumerate(outputs) if isinstance(value, Tensor) and holders[memory_of(value)] == 1
    )


def outputs_to_copy(inputs: Sequence[Any], outputs: Sequence[Any], unaliased: Sequence[int]) -> tuple[int, ...]:
    """The places in `unaliased` of outputs that share memory all the same, or are views that must not be mutated."""
    if not unaliased:
        return ()
    holders = Counter(map(memory_of, (*inputs, *outputs)))
    return tuple(
        place for place in unaliased if holders[memory_of(outputs[place])] > 1 or is_locked_view(outputs[place])
    )


def views_without_gradients(outputs: Sequence[Any], unaliased: Sequence[int]) -> tuple[int, ...]:
    """The places in `unaliased` of outputs that are views made under `no_grad`, as compiled code runs.

    Autograd refuses to mutate them by what has gradients, which the body's own results allow; detached, they are no
    views.
    """
    return tuple(place for place in unaliased if outputs[place]._is_view() and not outputs[place].requires_grad)


def copy_of(value: Tensor) -> Tensor:
    """A copy with the same strides, through which gradients flow."""
    copied = value.clone()
    if copied.stride() == value.stride():
        return copied
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def memory_of(value: Any) -> object:
    """A key that is equal for values that share memory."""
    return storage_key(value) if isinstance(value, Tensor) else object()
