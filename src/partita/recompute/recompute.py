"""The treatment `Recompute`: intermediate results of a region are not saved for backward but recomputed there.

It decides what is kept, which inputs and state need copies because they are mutated, and which regions are refused.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, final

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

import partita.hops as hops
from partita._plain_help import PlainHelp
from partita._torch.functorch import is_inside_transform
from partita._torch.operator_schemas import registers_hook
from partita._torch.toggles import ENTER_INFERENCE
from partita.analysis.effects.calls import CallEffects
from partita.analysis.effects.terms import Effects
from partita.analysis.modes import Autocast
from partita.analysis.mutation import Mutations, Mutators
from partita.analysis.nodes import find, value_of
from partita.analysis.projections import takes_item, with_items
from partita.errors import OptionError, RecomputeError
from partita.hops._torch.node_tags import next_graph_id
from partita.plans.memory import SavedBytes, saved_bytes_of
from partita.plans.treatment import Called, Site
from partita.program.program import Program, mutated_positions
from partita.program.saved_tensors import SavedTensors
from partita.recompute._torch.checkpoint_plan import annotate_plan, checkpoint_plan
from partita.recompute.keep import Keep, KeepNothing, gives_tensors, keepable
from partita.recompute.operators import keep, wrap_activation_checkpoint
from partita.regions import Partition, Region
from partita.rewrite.operator_calls import OperatorCall, call_through
from partita.rewrite.outline import CallModes, outlined
from partita.rewrite.wrap_modes import WrapStyle, wrap_modes

_CHECKPOINT = OperatorCall(wrap_activation_checkpoint)
#: Dynamo cannot trace autocast toggles in a subgraph of its graph, but it can trace operators.
_WRAPPED = WrapStyle(kinds=(Autocast,), in_modules=True)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Recompute(metaclass=PlainHelp):
    """Recomputes the region in the backward, except for what `keep` keeps; same values and gradients, bit for bit.

    Example::

        from partita.treatments import KeepExpensive, Recompute

        plan = partita.plan(program, ByModule("*"), Recompute())
        plan = partita.plan(program, ByModule("*"), Recompute(KeepExpensive()))
        print(plan)  # with the bytes that are saved for backward, and what is recomputed
        plan.apply().module()(x).sum().backward()

    Regions in series are recomputed one at a time, each just before its backward. Random numbers are the same in both
    runs, and buffers are mutated once. In a graph that is compiled whole, marks tell the compiler to do the same.
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
        """The nodes of the region whose results are kept: what `keep` returns, and reads of memory that is mutated."""
        kept, inside = _nodes(self.keep, self.keep(region)), set(region.nodes)
        for node in kept:
            if node not in inside:
                name = getattr(node, "name", node)
                raise RecomputeError(
                    f"{_named(self.keep)} keeps {name!r}, which is not in region {region.name!r}; it may only "
                    "keep nodes of the region passed to it"
                )
        mutations = region.surroundings().mutations
        mutated = mutations.names_mutated(kept)
        for node in kept:
            if node.name in mutated:
                raise RecomputeError(
                    f"{_named(self.keep)} keeps {node.name!r}, but {_mutation(node, mutations)}; keep another "
                    "node, or mutate a copy"
                )
        # A compiler would recompute these from memory that was mutated in between.
        needed = set(mutations.reads_of_mutated_inputs(region.nodes)).intersection(keepable(region))
        # An operator returns all of its items at once, so an item is kept with its container.
        containers = (node.all_input_nodes[0] for node in kept if takes_item(node))
        kept = (*kept, *inside.intersection(containers))
        return frozenset((*filter(gives_tensors, kept), *needed, *mutations.statistics_read_outside(region.nodes)))

    def treat_at(self, body: GraphModule, site: Site) -> Called:
        return self._treated(body, {node.name for node in self.kept(site.region)}, site)

    def treat(self, body: GraphModule) -> Called:
        """The call that replaces a region of which only the body is known."""
        region = Region("region", tuple(Program(body).operators()))
        return self._treated(body, {node.name for node in self.kept(region)}, Site(region))

    def sharing_key(self, site: Site) -> Hashable | None:
        """Which nodes are kept; None where inputs or state of the region are mutated, for the plan says which."""
        region, program = site.region, site.program
        if program is None or program.effects.mutated_state:
            return None
        sources = region.inputs()
        if any(True for _ in region.surroundings().mutations.later_mutators(sources, region.nodes)):
            return None
        if any(True for _ in _possible_aliases_mutated_later(region, sources, program)):
            return None
        kept = self.kept(region)
        return tuple(at for at, node in enumerate(region.nodes) if node in kept)

    def marks(self, region: Region) -> Mapping[str, object]:
        """The metadata that a joint-graph partitioner reads: an increasing region number, and the recompute policy."""
        return {"ac_graph_id": next_graph_id(), "recompute": torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE}

    def node_marks(self, region: Region) -> Mapping[Node, Mapping[str, object]]:
        """Marks what is saved: the kept nodes, the region's outputs, and reads of memory that is mutated afterwards.

        The last may be nodes outside: a partitioner that recomputes a region chooses more nodes itself.
        """
        saved = with_items((*self.kept(region), *region.outputs()), set(region.nodes))
        # One mapping for all regions of a program: there may be as many regions as nodes.
        return ChainMap(dict.fromkeys(saved, _MUST_SAVE), region.surroundings().once(_marks_of_mutated))

    def saved_bytes(self, region: Region, saved: SavedTensors) -> SavedBytes | None:
        """The bytes saved for backward with and without recomputation, and its cost; printed with the plan."""
        return saved_bytes_of(region, saved, self.kept(region))

    def _treated(self, body: GraphModule, kept: set[str], site: Site) -> Called:
        pure = () if site.program is None else site.program.pure
        program = Program(body, caller=site.caller, pure=pure)
        _check_body(program, site.region)
        # The body has no node for items of containers made elsewhere, and inference tensors are never saved.
        modes, number = program.modes, program.index.number
        kept = {
            node.name
            for node in program.operators()
            if node.name in kept and not modes.at(number[node]).inference and not _loses_history_when_kept(node, body)
        }
        module = _wrap_kept(program, kept) if kept else body
        module = wrap_modes(Program(module, caller=site.caller, pure=pure), _WRAPPED).graph_module
        plan = checkpoint_plan(
            module,
            program,
            mutated_inputs=(*program.once(mutated_positions), *_inputs_mutated_later(body, site.region, site.program)),
            mutated_state=tuple(_mutated_state(module, program if site.program is None else site.program)),
            is_complete=True,
        )
        annotate_plan(module, plan)
        return Called(module, _CHECKPOINT)


_MUST_SAVE: Mapping[str, object] = MappingProxyType({"recompute": torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE})


def _marks_of_mutated(program: Program) -> dict[Node, Mapping[str, object]]:
    """Marks for the reads of memory that is mutated afterwards, in the whole program."""
    names, everything = program.mutations.saved_when_compiled, dict.fromkeys(program.graph.nodes)
    return dict.fromkeys(with_items([node for node in everything if node.name in names], everything), _MUST_SAVE)


def _named(keep: Keep) -> str:
    return getattr(keep, "__qualname__", None) or repr(keep)


def _nodes(keep: Keep, found: object) -> tuple[Node, ...]:
    if isinstance(found, Node | str) or not isinstance(found, Iterable):
        raise RecomputeError(
            f"{_named(keep)} returned {type(found).__name__} as what is kept; it returns a list of nodes of the region"
        )
    return tuple(found)


def _loses_history_when_kept(call: Node, root: GraphModule) -> bool:
    """Whether results of a call lose their autograd history under a dispatch mode (torch 2.13), which keeping uses.

    An in-place foreach loses its gradients; a view that is made in inference mode does not require any.
    """
    targets = [call.target, *(node.target for node in call.all_input_nodes if node.op == "get_attr")]
    bodies = [find(root, target) for target in targets if isinstance(target, str)]
    modules = (module for body in bodies if isinstance(body, nn.Module) for module in body.modules())
    graphs = (module.graph for module in modules if isinstance(module, GraphModule))
    inside = [node.target for graph in graphs for node in graph.nodes]
    if any("_foreach_" in str(target) for target in inside):
        return True
    return any(target in (ENTER_INFERENCE, hops.wrap_with_inference_mode) for target in (call.target, *inside))


def _mutation(node: Node, mutations: Mutations) -> str:
    names = mutations.mutators_of(node)
    return f"{min(names)!r} mutates its memory" if names else "that node is an in-place operation"


_KEEP = OperatorCall(keep)


def _wrap_kept(body: Program, kept: Collection[str]) -> GraphModule:
    """A module like `body` in which the nodes with these names run in calls of `keep`, neighbours together."""
    runs: list[list[Node]] = []
    in_run = False
    items = {body.index.nodes[number] for number in body.projections}
    for node in body.graph.nodes:
        if node in items:
            continue  # It is taken where its container is.
        if node.name in kept:
            if not in_run:
                runs.append([])
            runs[-1].append(node)
        if node.op not in ("placeholder", "get_attr"):
            in_run = node.name in kept
    regions = [Region(f"kept_{run[0].name}", tuple(run)) for run in runs]
    # Where no result is used afterwards, nothing can be kept.
    regions = [region for region in regions if region.outputs()]
    # The calls run in the modes of what they keep: one autocast block around several of them casts a weight once.
    modes = [body.modes.at(body.index.number[region.nodes[0]]) for region in regions]
    # The body may become part of an exported program, which cannot be saved if a float crosses.
    partition = Partition(body, regions, passes_scalars=False)
    cut = outlined(partition, call_modes=CallModes(modes, modes, body.modes.final))
    for name, part in zip(cut.names, cut.bodies, strict=True):
        cut.graph_module._modules[name] = part
    call_through(cut.graph_module, dict.fromkeys(cut.names, _KEEP))
    return cut.graph_module


def _inputs_mutated_later(body: GraphModule, region: Region, program: Program | None) -> tuple[int, ...]:
    """The positions of inputs of the body that may be mutated after the region has read them: these need copies."""
    sources = region.inputs()
    mutations = region.surroundings().mutations
    mutated = {
        *mutations.later_mutators(sources, region.nodes),
        *_possible_aliases_mutated_later(region, sources, program),
    }
    if not mutated:
        return ()
    names = {node.name for node in mutated}
    places = {node.name: place for place, node in enumerate(body.graph.find_nodes(op="placeholder"))}
    if names - places.keys():
        # Inputs whose names differ from their sources', such as items of containers, may be any of these.
        names |= places.keys() - {node.name for node in sources}
    return tuple(place for name, place in places.items() if name in names)


def _mutated_state(body: GraphModule, program: Program) -> Iterator[str]:
    """The names of parameters and buffers in the body that any node of the program may mutate."""
    mutated = program.once(_identities_of_mutated_state)
    for name, tensor in (*body.named_parameters(), *body.named_buffers()) if mutated else ():
        if id(tensor) in mutated:
            yield name


def _identities_of_mutated_state(program: Program) -> frozenset[int]:
    return frozenset(map(id, program.effects.mutated_state))


def _possible_aliases_mutated_later(
    region: Region, sources: tuple[Node, ...], program: Program | None
) -> Iterator[Node]:
    """Sources that may alias an input that is mutated later, since a caller may pass one tensor twice."""
    memory = frozenset[int]() if program is None else program.once(_caller_memory)
    if program is None or not memory:
        return
    places, classes = program.mutations.places, program.mutations.classes
    last = program.once(_caller_mutators).last_place(without={node.name for node in region.nodes})
    if last is None:
        return
    read_before = {source for node in region.nodes if places[node.name] < last for source in node.all_input_nodes}
    yield from (source for source in sources if classes[source.name] in memory and source in read_before)


def _caller_mutators(program: Program) -> Mutators:
    """The nodes that may mutate one of the caller's tensors."""
    return program.mutations.mutators_in(program.once(_caller_memory))


def _caller_memory(program: Program) -> frozenset[int]:
    """The storage classes of the caller's tensors, if one of several is mutated."""
    inputs = list(_user_inputs(program))
    mutated = {program.index.nodes[number] for number in program.effects.mutated_inputs}
    if len(inputs) < 2 or mutated.isdisjoint(inputs):
        return frozenset()
    return frozenset(program.mutations.classes[node.name] for node in inputs)


def _user_inputs(program: Program) -> Iterator[Node]:
    """The inputs that a caller passes tensors for, without parameters and buffers."""
    placeholders = program.graph.find_nodes(op="placeholder")
    if program.export is None:
        yield from (node for node in placeholders if not isinstance(value_of(node), nn.Parameter | int | float))
        return
    for node, spec in zip(placeholders, program.export.signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            yield node


def _check_body(body: Program, region: Region) -> None:
    """Raises where a second run of a region's body could differ from the first, or repeat a side effect."""
    nodes = body.index.nodes
    inside = next(filter(is_inside_transform, region.nodes), None)
    if inside is not None:
        raise RecomputeError(
            f"node {inside.name!r} in region {region.name!r} runs inside a torch.func transform, whose levels "
            "are gone when the backward runs; leave the whole transform out of the region"
        )
    for number in body.effects.barriers:
        raise RecomputeError(
            f"node {nodes[number].name!r} in region {region.name!r} has unknown effects, so it may not be safe "
            "to run twice; declare it with Program.of(..., pure=[...]), or leave it out of the region"
        )
    for node, effects in _effectful_nodes(body.graph_module):
        effect = _unrepeatable_effect(node, effects)
        if effect is not None:
            raise RecomputeError(
                f"node {node.name!r} in region {region.name!r} {effect}, which would happen again; leave it out"
            )


def _unrepeatable_effect(node: Node, effects: Effects) -> str | None:
    """The side effect of a node that must not happen twice; only the state of default generators is restored."""
    if node.target is print:
        return "prints"
    if registers_hook(node.target):
        return "registers a hook"
    return "uses its own random number generator" if effects.own_generator else None


def _effectful_nodes(body: GraphModule) -> Iterator[tuple[Node, Effects]]:
    """The nodes with effects of a body, and of the bodies that its operators run; an operator comes after its body."""
    known: dict[nn.Module, Effects] = {}
    for module in reversed([module for module in body.modules() if isinstance(module, GraphModule)]):
        effectful = CallEffects(module, known_modules=known).effectful
        yield from ((node, effectful[node]) for node in module.graph.nodes if node in effectful)
