"""Recompute."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

import partita.hops as hops
from partita._torch.operators.schemas import Signature, registers_hook, signatures_of, signatures_of_method
from partita._torch.toggles import ENTER_INFERENCE
from partita.analysis._torch.body_effects import BodyEffects, annotate_effects, may_trace, saves_before_mutation
from partita.analysis.functorch import is_inside_transform
from partita.analysis.mode import Autocast
from partita.analysis.mutation import (
    later_writers,
    names_written,
    reads_of_mutated_inputs,
    saved_when_compiled,
    statistics_read_outside,
    writers_of,
)
from partita.analysis.nodes import find, value_of
from partita.analysis.op_effects.calls import CallEffects, storages_of, written_classes
from partita.analysis.op_effects.modules import may_use_rng
from partita.analysis.projections import takes_item
from partita.errors import OptionError, RecomputeError
from partita.hops._torch.node_tags import next_graph_id
from partita.plans.memory import SavedBytes, saved_bytes_of
from partita.plans.treatment import Called, Site
from partita.program.body_effects import effectful_nodes, may_write, written_inputs
from partita.program.program import Program
from partita.program.saved_tensors import SavedTensors
from partita.recompute.keep import Keep, KeepNothing, gives_tensors, keepable
from partita.recompute.operators import keep, wrap_activation_checkpoint
from partita.regions import Partition, Region
from partita.rewrite.operator_calls import OperatorCall, call_through
from partita.rewrite.outline import CallModes, outlined
from partita.rewrite.wrap_modes import WrapStyle, wrap_modes

__all__ = ["Recompute", "draws_from_own_generator"]


# Recompute: the region's results are not kept for the backward but computed again when it needs them.


_CHECKPOINT = OperatorCall(wrap_activation_checkpoint)
#: Dynamo cannot follow calls that switch autocast in a body of its graph; operators it can.
_WRAPPED = WrapStyle(kinds=(Autocast,), in_modules=True)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Recompute:
    """Computes the region again in the backward, all but what `keep` keeps; same values and gradients, bit for bit.

    Regions in series are recomputed one at a time, each just before its backward. Random numbers are the same in both
    runs, and buffers are written once. As marks on a graph that is compiled whole, the same is said to the compiler.
    """

    keep: Keep = field(default_factory=KeepNothing)

    #: A compiler that reads the marks needs no cut.
    annotation_suffices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.keep) or isinstance(self.keep, type):
            raise OptionError(f"keep is a function from a region to nodes, such as KeepNothing(), not {self.keep!r}")

    def __repr__(self) -> str:
        return f"Recompute(keep={_named(self.keep)})"

    def kept(self, region: Region) -> frozenset[Node]:
        """The nodes of the region whose results are kept: what `keep` says, and what reads memory that changes."""
        kept, inside = _nodes(self.keep, self.keep(region)), set(region.nodes)
        for node in kept:
            if node not in inside:
                name = getattr(node, "name", node)
                raise RecomputeError(
                    f"{_named(self.keep)} keeps {name!r}, which is not in region {region.name!r}; it may keep nodes of "
                    "the region that it is asked about"
                )
        written = names_written(kept)
        for node in kept:
            if node.name in written:
                raise RecomputeError(
                    f"{_named(self.keep)} keeps {node.name!r}, but {_writer(node)}; keep another node, or write to a "
                    "copy"
                )
        # A compiler would compute these again from what was written meanwhile.
        needed = set(reads_of_mutated_inputs(region.nodes)).intersection(keepable(region))
        return frozenset((*filter(gives_tensors, kept), *needed, *statistics_read_outside(region.nodes)))

    def treat_at(self, body: GraphModule, site: Site) -> Called:
        return self._treated(body, {node.name for node in self.kept(site.region)}, site)

    def treat(self, body: GraphModule) -> Called:
        """What is called in the place of a region of which nothing but its body is known."""
        region = Region("region", tuple(Program(body).operators()))
        return self._treated(body, {node.name for node in self.kept(region)}, Site(region))

    def marks(self, region: Region) -> Mapping[str, object]:
        """What a partitioner of joint graphs reads: the region's number, larger than all before, and its choice."""
        return {"ac_graph_id": next_graph_id(), "recompute": torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE}

    def node_marks(self, region: Region) -> Mapping[Node, Mapping[str, object]]:
        """What is saved: the kept nodes, what the region gives to others, and what cannot be read again afterwards.

        Nodes outside are among the last: a partitioner that is told to compute a region again picks more itself.
        """
        inside, everything = set(region.nodes), dict.fromkeys(region.nodes[0].graph.nodes)
        lost = saved_when_compiled(everything)
        saved = (*self.kept(region), *region.outputs(), *(node for node in lost if node in inside))
        outside = [node for node in lost if node not in inside]
        mark = {"recompute": torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE}
        return dict.fromkeys((*_whole(saved, inside), *_whole(outside, everything)), mark)

    def saved_bytes(self, region: Region, saved: SavedTensors) -> SavedBytes | None:
        """What autograd holds for the region as it is, and recomputed, and what that costs; a plan prints it."""
        return saved_bytes_of(region, saved, self.kept(region))

    def _treated(self, body: GraphModule, kept: set[str], site: Site) -> Called:
        pure = () if site.program is None else site.program.pure
        program = Program(body, caller=site.caller, pure=pure)
        check_body(program, site.region)
        acts = effectful_nodes(program, frozenset())
        # Items of a container that is made elsewhere come in as they are, and inference tensors are never saved.
        modes, number = program.modes, program.index.number
        kept = {
            node.name
            for node in program.operators()
            if node.name in kept and not modes.at(number[node]).inference and not _runs_what_loses_history(node, body)
        }
        module = keep_apart(program, kept) if kept else body
        module = wrap_modes(Program(module, caller=site.caller, pure=pure), _WRAPPED).graph_module
        written: tuple[int | str, ...] = (
            *written_inputs(program),
            *inputs_written_later(body, site.region, site.program),
            *state_written(module, program if site.program is None else site.program),
        )
        draws = bool(acts.draws) or _may_draw_in_training(module)
        facts = BodyEffects(
            may_write(program),
            draws,
            written,
            knows_written=True,
            saves_before_mutation=saves_before_mutation(module),
            may_trace=may_trace(module),
        )
        annotate_effects(module, facts)
        return Called(module, _CHECKPOINT)


def _named(keep: Keep) -> str:
    return getattr(keep, "__qualname__", None) or repr(keep)


def _nodes(keep: Keep, found: object) -> tuple[Node, ...]:
    if isinstance(found, Node | str) or not isinstance(found, Iterable):
        raise RecomputeError(
            f"{_named(keep)} gave {type(found).__name__} as what is kept; it gives nodes of the region, in a list"
        )
    return tuple(found)


def _whole(nodes: Iterable[Node], inside: Collection[Node]) -> dict[Node, None]:
    """These of the nodes inside; an operator that gives a tuple goes with all its items, and each item with all of it.

    Where only the operator is marked as saved, torch's min-cut partitioner (2.13) finds no cut, and where only items
    are, it recomputes them with the operator.
    """
    whole: dict[Node, None] = {}
    for node in nodes:
        while takes_item(node) and node.all_input_nodes[0] in inside:
            node = node.all_input_nodes[0]
        open_nodes = [] if node in whole else [node]
        while open_nodes:
            container = open_nodes.pop()
            whole[container] = None
            open_nodes += [user for user in container.users if user in inside and takes_item(user)]
    return whole


def _runs_what_loses_history(call: Node, root: GraphModule) -> bool:
    """Whether a call runs a body that torch takes history from where it is kept, in front of a dispatch mode (2.13).

    A foreach that writes loses its gradients; a view that is made in inference mode does not require any.
    """
    targets = [call.target, *(node.target for node in call.all_input_nodes if node.op == "get_attr")]
    bodies = [find(root, target) for target in targets if isinstance(target, str)]
    modules = (module for body in bodies if isinstance(body, nn.Module) for module in body.modules())
    graphs = (module.graph for module in modules if isinstance(module, GraphModule))
    inside = [node.target for graph in graphs for node in graph.nodes]
    if any("_foreach_" in str(target) for target in inside):
        return True
    return any(target in (ENTER_INFERENCE, hops.wrap_with_inference_mode) for target in (call.target, *inside))


def _may_draw_in_training(body: GraphModule) -> bool:
    """Whether a module that is called in a body, or in one that its operators run, draws once it is set to training."""
    for part in body.modules():
        for node in part.graph.find_nodes(op="call_module") if isinstance(part, GraphModule) else ():
            module = part.get_submodule(str(node.target))
            if not isinstance(module, GraphModule) and may_use_rng(module):
                return True
    return False


def _writer(node: Node) -> str:
    names = writers_of(node)
    return f"{min(names)!r} writes to its memory" if names else "that node writes in place"


# Kept nodes of a body, in calls of the operator that keeps what they give.


_KEEP = OperatorCall(keep)


def keep_apart(body: Program, kept: Collection[str]) -> GraphModule:
    """A module like `body` in which the nodes with these names run inside of `hops.keep`, neighbours together."""
    runs: list[list[Node]] = []
    is_open = False
    for node in body.graph.nodes:
        if node.name in kept:
            if not is_open:
                runs.append([])
            runs[-1].append(node)
        if node.op not in ("placeholder", "get_attr"):
            is_open = node.name in kept
    regions = [Region(f"kept_{run[0].name}", tuple(run)) for run in runs]
    # Where nothing is used afterwards, nothing can be kept.
    regions = [region for region in regions if region.outputs()]
    # The calls are in the modes of what they keep: one autocast block around several of them casts a weight once.
    modes = [body.modes.at(body.index.number[region.nodes[0]]) for region in regions]
    cut = outlined(Partition(body, regions), call_modes=CallModes(modes, modes, body.modes.final))
    for name, part in zip(cut.names, cut.bodies, strict=True):
        cut.graph_module._modules[name] = part
    call_through(cut.graph_module, dict.fromkeys(cut.names, _KEEP))
    return cut.graph_module


# What a recomputed region needs copies of: inputs that somebody writes once it has read them, and state.


def inputs_written_later(body: GraphModule, region: Region, program: Program | None) -> tuple[int, ...]:
    """The places of inputs of the body that somebody may write to when the region has read them."""
    sources = region.inputs()
    written = {*later_writers(sources, region.nodes), *_written_by_chance(region, sources, program)}
    if not written:
        return ()
    names = {node.name for node in written}
    places = {node.name: place for place, node in enumerate(body.graph.find_nodes(op="placeholder"))}
    if names - places.keys():
        # Inputs that are called otherwise than what they stand for, such as items of containers, may be any of these.
        names |= places.keys() - {node.name for node in sources}
    return tuple(place for name, place in places.items() if name in names)


def state_written(body: GraphModule, program: Program) -> Iterator[str]:
    """The names of parameters and buffers in the body that any node of the program may write."""
    written = _written_state(program)
    for name, tensor in (*body.named_parameters(), *body.named_buffers()) if written else ():
        if id(tensor) in written:
            yield name


def _written_state(program: Program) -> frozenset[int]:
    if program not in _KNOWN_STATE:
        _KNOWN_STATE[program] = frozenset(map(id, program.effects.written_state))
    return _KNOWN_STATE[program]


#: Regions of one program ask one after the other.
_KNOWN_STATE: WeakKeyDictionary[Program, frozenset[int]] = WeakKeyDictionary()


def _written_by_chance(region: Region, sources: tuple[Node, ...], program: Program | None) -> Iterator[Node]:
    """Sources that may share memory with an input that is written later, since a caller may pass one tensor twice."""
    found = None if program is None else _input_memory(program)
    if program is None or found is None:
        return
    inside, number = set(region.nodes), program.index.number
    last = next((number[writer] for writer in reversed(found.writers) if writer not in inside), -1)
    for source in sources:
        if source in found.views:
            readers = (number[node] for node in source.users if node in inside)
            if min(readers) < last:
                yield source


class _InputMemory(NamedTuple):
    """The nodes that may look into memory of the caller's, and those that write such memory, in order."""

    views: frozenset[Node]
    writers: tuple[Node, ...]


#: Regions of one program ask one after the other; None where no input is written.
_KNOWN: WeakKeyDictionary[Program, _InputMemory | None] = WeakKeyDictionary()


def _input_memory(program: Program) -> _InputMemory | None:
    if program not in _KNOWN:
        inputs = list(_inputs(program))
        written = {program.index.nodes[number] for number in program.effects.written_inputs}
        is_shared = len(inputs) > 1 and not written.isdisjoint(inputs)
        _KNOWN[program] = _memory_of(program, inputs) if is_shared else None
    return _KNOWN[program]


def _memory_of(program: Program, inputs: list[Node]) -> _InputMemory:
    index, behaviours = program.index, CallEffects(program.graph_module, program.pure)
    acting = behaviours.acting(index.graph)
    storages = storages_of(index, behaviours, acting)
    memory = {storages.find(index.number[node]) for node in inputs}
    written = written_classes(index, storages, acting)
    return _InputMemory(
        frozenset(node for number, node in enumerate(index.nodes) if storages.find(number) in memory),
        tuple(index.nodes[number] for number in sorted(written) if not memory.isdisjoint(written[number])),
    )


def _inputs(program: Program) -> Iterator[Node]:
    """The inputs that a caller gives tensors for; parameters and buffers are the program's own."""
    placeholders = program.graph.find_nodes(op="placeholder")
    if program.export is None:
        yield from (node for node in placeholders if not isinstance(value_of(node), nn.Parameter | int | float))
        return
    for node, spec in zip(placeholders, program.export.signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            yield node


# What a region must not do if it is to be recomputed.


def check_body(body: Program, region: Region) -> None:
    """Raises where a second run of the body of a region could not give what the first gave."""
    nodes = body.index.nodes
    inside = next(filter(is_inside_transform, region.nodes), None)
    if inside is not None:
        raise RecomputeError(
            f"node {inside.name!r} in region {region.name!r} runs inside a transform of torch.func, whose levels "
            "are gone when the backward runs; leave the whole transform out of the region"
        )
    for number in body.effects.barriers:
        raise RecomputeError(
            f"node {nodes[number].name!r} in region {region.name!r} calls what nobody knows, so it may do what must "
            "not be done twice; declare it with Program.of(..., pure=[...]), or leave it out of the region"
        )
    for node in _all_nodes(body.graph_module):
        what = _done_again(node)
        if what is not None:
            raise RecomputeError(
                f"node {node.name!r} in region {region.name!r} {what}, which would happen again; leave it out"
            )


def _done_again(node: Node) -> str | None:
    """What a node does that must not be done twice."""
    if node.target is print:
        return "prints"
    if registers_hook(node.target):
        return "registers a hook"
    return "draws from a generator of its own" if draws_from_own_generator(node) else None


def draws_from_own_generator(node: Node) -> bool:
    """Whether a call is given a generator, by keyword or by its place in a schema; the default ones are put back."""
    if node.kwargs.get("generator") is not None:
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    signatures = signatures_of_method(str(node.target)) if node.op == "call_method" else signatures_of(node.target)
    return any(_is_generator(given) for signature in signatures for given in _in_place_of_generator(node, signature))


def _in_place_of_generator(node: Node, signature: Signature) -> Iterator[object]:
    for argument in signature.arguments:
        if argument.name == "generator" and 0 <= argument.position < len(node.args):
            yield node.args[argument.position]


def _is_generator(given: object) -> bool:
    """Whether an argument may be a generator; another overload may have something else in that place."""
    if not isinstance(given, Node):
        return isinstance(given, torch.Generator)
    value = value_of(given)
    return value is None or isinstance(value, torch.Generator)


def _all_nodes(body: GraphModule) -> Iterator[Node]:
    """The nodes of a body, and of the bodies that its operators run."""
    for module in body.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes
