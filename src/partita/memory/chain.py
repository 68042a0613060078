"""A program as a chain of segments: what each reads, returns and leaves behind, and the ways to run it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from partita._torch.operator_schemas import storage_key
from partita._torch.symbolic_shapes import hint_of
from partita.analysis.nodes import bytes_of_value, value_of
from partita.errors import BudgetError, PartitaError
from partita.memory.program_state import resident_bytes, state_identity, states_of, user_outputs
from partita.memory.rates import Rates
from partita.memory.trials import Input, Segment, Trial, trial_of
from partita.plans import plan
from partita.program.program import Program
from partita.recompute import KeepNodes, KeepNothing, Recompute
from partita.recompute.keep import keepable
from partita.regions import Partition, Region
from partita.regions.equal_bodies import body_numbers
from partita.rewrite.outline import outlined
from partita.solvers.keep_sets import Item, keep_sets
from partita.solvers.peak import Choice, IfSaved, Stage


@final
@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a segment: as it is, or recomputed, with the places of the nodes whose results are kept."""

    is_recomputed: bool
    kept: tuple[int, ...]
    trial: Trial


@final
@dataclass(frozen=True, slots=True)
class Link:
    """One segment of a chain, the ways to run it (the first is as it is), and what is allocated around it."""

    region: Region
    ways: tuple[Way, ...]
    #: Gradients and results of later segments that are allocated when its backward begins, beside those of its outputs.
    before_backward: int
    #: The names that records of the ways have for the nodes of the region, in order.
    names: tuple[str, ...]
    shared: SharedValues

    def node_named(self, name: str) -> Node | None:
        """The node of this segment that has this name in records, which are those of the first equal segment."""
        return self.region.nodes[self.names.index(name)] if name in self.names else None

    def stage(self) -> Stage:
        """The segment as numbers."""
        choices = tuple(map(self.choice, self.ways))
        return Stage(choices, self.before_backward, self.shared.ends, self.shared.passing)

    def extra_seconds(self, way: Way) -> float:
        """The seconds that one way to run it adds; none is quicker than to run it as it is."""
        return max(way.trial.seconds - self.ways[0].trial.seconds, 0.0)

    def choice(self, way: Way) -> Choice:
        """One way to run it as numbers."""
        trial = way.trial
        return Choice(
            self.extra_seconds(way),
            trial.held,
            trial.forward,
            trial.backward,
            self.shared.saved_by(trial),
            self.shared.if_saved(trial),
        )


@final
@dataclass(frozen=True, slots=True)
class SharedValues:
    """The storages that a segment shares with others, by number: those of its inputs and outputs; None for others."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    #: Those that no later segment reads.
    ends: frozenset[int]
    #: Those of earlier segments that later ones read and this one does not, with their bytes.
    passing: tuple[tuple[int, int], ...]

    def saved_by(self, trial: Trial) -> frozenset[int]:
        """What one way to run the segment saves for backward."""
        flags = (*zip(self.inputs, trial.saves_input, strict=True), *zip(self.outputs, trial.saves_output, strict=True))
        return frozenset(value for value, is_saved in flags if is_saved and value is not None)

    def if_saved(self, trial: Trial) -> tuple[IfSaved, ...]:
        """What one way to run it needs more if an earlier segment has saved an input."""
        numbered = [(number, value) for number, value in enumerate(self.inputs) if value is not None]
        found = (IfSaved(value, *trial.if_saved(number)) for number, value in numbered)
        return tuple(one for one in found if one.held or one.forward or one.backward)


@final
@dataclass(frozen=True, slots=True)
class Chain:
    """All segments of a training step in the order of the forward."""

    program: Program
    partition: Partition
    links: tuple[Link, ...]
    #: Parameters, buffers, constants and arguments, which are allocated throughout.
    resident_bytes: int
    #: The number of the output that is the loss.
    loss: int
    #: The seconds of the plain step.
    seconds: float

    def stages(self) -> list[Stage]:
        """The segments as numbers."""
        return [link.stage() for link in self.links]


@final
@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step is run, beside the model: the device's speed, and what the caller keeps."""

    rates: Rates
    #: Whether the caller keeps the outputs of the model during the backward.
    keeps_outputs: bool = True
    #: Allocated sizes are multiples of this.
    rounding: int = 1
    #: The most ways to recompute a segment that repeats, and one that does not.
    most_ways: tuple[int, int] = (16, 6)


def chain_of(
    program: Program, partition: Partition, options: StepOptions, *, recomputed: Collection[str] = ()
) -> Chain:
    """Tries every distinct segment on fake tensors, once for each way to run it; raises if nothing can be trained.

    Of segments that are named in `recomputed`, the only way is to recompute them from their inputs.
    """
    cut = outlined(partition)
    bodies = dict(zip(cut.names, cut.bodies, strict=True))
    found = _Walk(program, partition, cut.graph_module, bodies, options, frozenset(recomputed))
    found.walk()
    return Chain(
        program,
        partition,
        tuple(found.links()),
        resident_bytes(program),
        found.loss,
        sum(ways[0].trial.seconds for ways in found.ways),
    )


class _Walk:
    """Goes through the outlined program, segment by segment."""

    def __init__(
        self,
        program: Program,
        partition: Partition,
        outer: GraphModule,
        bodies: dict[str, Any],
        options: StepOptions,
        recomputed: frozenset[str],
    ) -> None:
        self.recomputed = recomputed
        #: The places of the nodes of each region that can be kept: other regions may mutate some of them.
        self._keepable = {
            name: _places(region, set(keepable(region))) for name, region in zip(bodies, partition.regions, strict=True)
        }
        self.program, self.partition, self.outer, self.bodies, self.options = program, partition, outer, bodies, options
        self.regions = dict(zip(bodies, partition.regions, strict=True))
        self.numbers = dict(zip(bodies, body_numbers(partition), strict=True))
        self.requires_grad: dict[Node, bool] = {}
        self.calls: list[Node] = []
        self.ways: list[tuple[Way, ...]] = []
        self.segments: list[Segment] = []
        self._known: dict[Hashable, tuple[Way, ...]] = {}
        self._plain: dict[Hashable, Trial] = {}
        self._shared = _Storages(outer.graph, set(bodies))
        self._names: dict[Hashable, tuple[str, ...]] = {}
        self.output = outer.graph.output_node()
        self.results = user_outputs(program, self.output)
        self.loss = -1

    def walk(self) -> None:
        states = states_of(self.program)
        for node in self.outer.graph.nodes:
            if node.op == "placeholder":
                value = states.get(node.name, value_of(node))
                self.requires_grad[node] = isinstance(value, Tensor) and value.requires_grad
            elif node.op == "call_module" and node.target in self.bodies:
                self._try(node)
            elif node.target is not operator.getitem:
                self.requires_grad[node] = False

    def _try(self, call: Node) -> None:
        name = str(call.target)
        outputs = _items_of(call)
        segment = self._segment(call, outputs, gets=tuple(self._is_read(item) for item in outputs))
        plain = self._plain_trial(name, segment)
        for item, requires_grad in zip(outputs, plain.requires_grad, strict=True):
            if item is not None:
                self.requires_grad[item] = requires_grad
        loss = self._loss_in(outputs)
        if loss is not None:
            # Only now it is known which result requires gradients.
            gets = tuple(self._is_read(item) or item is loss for item in outputs)
            segment = self._segment(call, outputs, gets=gets)
        self.calls.append(call)
        self.segments.append(segment)
        self.ways.append(self._ways_of(name, segment))

    def _segment(self, call: Node, outputs: Sequence[Node | None], *, gets: tuple[bool, ...]) -> Segment:
        return Segment(
            self.bodies[str(call.target)],
            tuple(self._input(node, call) for node in call.args if isinstance(node, Node)),
            gets,
            tuple(item is not None and self._is_returned(item) and self.options.keeps_outputs for item in outputs),
        )

    def _input(self, node: Node, call: Node) -> Input:
        is_resident = node.op in ("placeholder", "get_attr")
        return Input(node, is_resident, self.requires_grad.get(node, False), self._shared.ends_in(node, call))

    def _is_read(self, item: Node | None) -> bool:
        """Whether a later segment reads an output."""
        return item is not None and any(user is not self.output for user in item.users)

    def _is_returned(self, item: Node) -> bool:
        return self.output in item.users

    def _loss_in(self, outputs: Sequence[Node | None]) -> Node | None:
        """The result that is a single number with a gradient, if it is among these outputs."""
        for item in outputs:
            if item in self.results and self.requires_grad[item] and _is_number(item):
                if self.loss >= 0:
                    raise BudgetError(
                        "the model returns several numbers that require gradients, so which one is the loss is not "
                        "known; return the loss and what needs no gradient (detach it)"
                    )
                self.loss = self.results.index(item)
                return item
        return None

    def _key(self, name: str, segment: Segment) -> Hashable:
        roles = tuple((one.is_resident, one.requires_grad, one.is_dying) for one in segment.inputs)
        kept = self._keepable[name]
        return self.numbers[name], roles, segment.gets_gradient, segment.is_kept, self._is_recomputed(name), kept

    def _is_recomputed(self, name: str) -> bool:
        return self.regions[name].name in self.recomputed

    def _plain_trial(self, name: str, segment: Segment) -> Trial:
        key = self._key(name, segment)
        if key not in self._plain:
            self._plain[key] = self._trial(segment, segment.body)
        return self._plain[key]

    def _trial(self, segment: Segment, module: GraphModule, plain: Trial | None = None) -> Trial:
        script = () if plain is None else plain.ran[: plain.backward_at]
        return trial_of(segment, module, self.options.rates, script=script, rounding=self.options.rounding)

    def _ways_of(self, name: str, segment: Segment) -> tuple[Way, ...]:
        key = self._key(name, segment)
        if key not in self._known:
            self._known[key] = tuple(self._found_ways(name, segment))
            self._names[key] = tuple(node.name for node in self.regions[name].nodes)
        return self._known[key]

    def _found_ways(self, name: str, segment: Segment) -> Iterator[Way]:
        """The plain way, and the ways to recompute the segment that nothing beats; only the first if it cannot be."""
        plain = self._plain_trial(name, segment)
        if not any(plain.requires_grad) or not plain.held_allocations:
            yield Way(False, (), plain)
            return
        body = Program(segment.body, pure=self.program.pure)
        region = Region(name, tuple(body.operators()))
        if self._is_recomputed(name):
            yield Way(True, (), self._recomputed(body, region, (), segment))
            return
        yield Way(False, (), plain)
        # A body may have nodes of its own, such as those that set a mode.
        places = {self.regions[name].nodes[place].name: place for place in self._keepable[name]}
        known = [plain]
        repeats = list(self.numbers.values()).count(self.numbers[name]) > 1
        for kept in self._menu(region, places, plain, most=self.options.most_ways[not repeats]):
            try:
                trial = self._recomputed(body, region, kept, segment)
            except PartitaError:  # What cannot be recomputed runs as it is.
                return
            if not any(_beats(other, trial) for other in known):
                known.append(trial)
                yield Way(True, tuple(places[one] for one in kept), trial)

    def _recomputed(self, body: Program, region: Region, kept: tuple[str, ...], segment: Segment) -> Trial:
        treatment = Recompute(KeepNodes(*kept) if kept else KeepNothing())
        module = plan(body, Partition(body, [region]), treatment).apply().graph_module
        return self._trial(segment, module, self._plain_trial(region.name, segment))

    def _menu(self, region: Region, known: Collection[str], plain: Trial, *, most: int) -> list[tuple[str, ...]]:
        """The names of the nodes to keep, of those that are known, for each way to try; first nothing."""
        names = [node.name for node in keepable(region) if node.name in known]
        sizes, seconds = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
        for one in plain.made:
            if one.node in sizes:
                sizes[one.node] += one.bytes
        for ran in plain.ran[: plain.backward_at]:
            if ran.node in seconds:
                work = self.options.rates.seconds(ran.flops, ran.moved_bytes, is_attention=ran.is_attention)
                seconds[ran.node] += work
        items = [name for name in names if sizes[name] and seconds[name]]
        sets = keep_sets([Item(sizes[name], seconds[name]) for name in items], most=most)
        return [tuple(items[number] for number in one.items) for one in sets]

    def links(self) -> Iterator[Link]:
        """The segments with the gradients that later ones leave."""
        if self.loss < 0:
            raise _no_loss(self.results, self.requires_grad)
        gradients, seen = 0, set[int]()
        before: list[int] = []
        passing = self._passing_gradients()
        shared = list(self._shared.along(self.calls))
        for call, segment, ways in reversed(list(zip(self.calls, self.segments, self.ways, strict=True))):
            before.append(gradients + passing.pop())
            kept = (item for item, is_kept in zip(_items_of(call), segment.is_kept, strict=True) if is_kept)
            gradients += sum(bytes_of_value(value_of(item)) or 0 for item in kept if item is not None)
            gets = ways[0].trial.gets_gradient
            for one, gets_gradient in zip(segment.inputs, gets, strict=True):
                if gets_gradient and one.is_resident and (key := state_identity(one.node, self.program)) not in seen:
                    seen.add(key)
                    gradients += bytes_of_value(value_of(one.node)) or 0
        for call, segment, ways, bytes_before in zip(
            self.calls, self.segments, self.ways, reversed(before), strict=True
        ):
            name = str(call.target)
            names = self._names[self._key(name, segment)]
            yield Link(self.regions[name], ways, bytes_before, names, shared.pop(0))

    def _passing_gradients(self) -> list[int]:
        """For each segment the bytes of gradients that wait, while it runs backward, for a segment before it."""
        place = {one: at for at, one in enumerate(self.calls)}
        change = [0] * (len(self.calls) + 1)
        for node, requires_grad in self.requires_grad.items():
            makers = [place[maker] for maker in _makers(node) if maker in place]
            readers = [place[user] for user in node.users if user in place]
            if requires_grad and makers and readers and makers[0] + 1 < max(readers):
                size = bytes_of_value(value_of(node)) or 0
                change[makers[0] + 1] += size
                change[max(readers)] -= size
        return list(accumulate(change))[:-1]


class _Storages:
    """The storages that segments share: which segments read each; views of one storage count as one value."""

    def __init__(self, graph: Graph, names: Collection[str]) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._number: dict[Node, int] = {}
        self._last: dict[int, Node | None] = {}
        for node in graph.nodes:
            number = self._number[node] = self._numbers.setdefault(_storage_of(node), len(self._numbers))
            if node.op in ("placeholder", "get_attr", "output"):
                self._last[number] = None  # Allocated throughout, or kept by the caller.
        for node in graph.nodes:
            is_segment = node.op == "call_module" and node.target in names
            for read in node.all_input_nodes:
                number = self._number[read]
                if node.op == "output":
                    self._last[number] = None
                elif is_segment and self._last.get(number, node) is not None:
                    self._last[number] = node

    def ends_in(self, node: Node, call: Node) -> bool:
        """Whether no later segment than this one reads the storage of a value, nor does the caller keep it."""
        return self._last.get(self._number[node]) is call

    def along(self, calls: Iterable[Node]) -> Iterator[SharedValues]:
        """The storages that each segment shares with others, in the order of the forward."""
        alive: dict[int, int] = {}
        for call in calls:
            inputs = [self._freed(node) for node in call.args if isinstance(node, Node)]
            items = _items_of(call)
            outputs = [None if item is None else self._freed(item) for item in items]
            ends = frozenset(one for one in inputs if one is not None and self._last[one] is call)
            passing = tuple((one, size) for one, size in alive.items() if one not in inputs)
            yield SharedValues(tuple(inputs), tuple(outputs), ends, passing)
            sizes = (0 if item is None else _storage_bytes(item) for item in items)
            alive.update((one, size) for one, size in zip(outputs, sizes, strict=True) if one is not None)
            for one in ends:
                alive.pop(one, None)

    def _freed(self, node: Node) -> int | None:
        """The number of a storage that is freed after a segment has read it last, unless one has saved it."""
        number = self._number[node]
        return None if self._last.get(number) is None else number


def _storage_of(node: Node) -> Hashable:
    value = value_of(node)
    return storage_key(value) if isinstance(value, Tensor) else node


def _storage_bytes(node: Node) -> int:
    value = value_of(node)
    return int(hint_of(value.untyped_storage().nbytes())) if isinstance(value, Tensor) else 0


def _places(region: Region, nodes: Collection[Node]) -> tuple[int, ...]:
    return tuple(place for place, node in enumerate(region.nodes) if node in nodes)


def _makers(node: Node) -> tuple[Node, ...]:
    """The call that an item is taken of, if it is one."""
    return tuple(node.all_input_nodes[:1]) if node.target is operator.getitem else ()


def _items_of(call: Node) -> list[Node | None]:
    """The nodes that take the outputs of a segment's call, in order."""
    value = value_of(call)
    places: dict[Any, Node] = {item.args[1]: item for item in call.users if item.target is operator.getitem}
    count = len(value) if isinstance(value, tuple | list) else max(places, default=-1) + 1
    return [places.get(place) for place in range(count)]


def _is_number(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _beats(one: Trial, other: Trial) -> bool:
    """Whether one trial is nowhere worse than the other."""
    return (
        one.seconds <= other.seconds
        and one.held <= other.held
        and one.forward <= other.forward
        and one.backward <= other.backward
    )


def _no_loss(results: Sequence[Node], requires_grad: dict[Node, bool]) -> BudgetError:
    trained = [node.name for node in results if requires_grad.get(node)]
    if not trained:
        return BudgetError(
            "no result of the model requires gradients, so there is no backward and nothing to recompute; train a "
            "model whose parameters require gradients, with gradients enabled"
        )
    return BudgetError(
        f"no result of the model is a single number: {', '.join(map(repr, trained))} require gradients, but which loss "
        "is made of them is not known; let the model return its loss"
    )
