"""Recompute: the region's results are not kept for the backward but computed again when it needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch.fx import GraphModule, Node

import partita.hops as hops
from partita._torch.checkpoint_facts import BodyFacts, note_facts
from partita._torch.node_tags import next_graph_id
from partita.backends.transforms import is_inside_transform
from partita.errors import OptionError, RecomputeError
from partita.graphs.later_writes import later_writer, names_written, readers_before_writes, writers_of
from partita.graphs.mode import Autocast
from partita.graphs.program import Program
from partita.graphs.saved_tensors import SavedTensors
from partita.plans.holding import Holding, holding_of
from partita.plans.treatment import Called, Site
from partita.regions import Region
from partita.rewrite.keep_apart import keep_apart
from partita.rewrite.operator_calls import OperatorCall
from partita.rewrite.wrap_modes import WrapStyle, wrap_modes
from partita.treatments.body_facts import acts_of, may_write, written_inputs
from partita.treatments.keep import Keep, KeepNothing, gives_tensors, keepable

__all__ = ["Recompute"]

_CHECKPOINT = OperatorCall(hops.wrap_activation_checkpoint)
#: Dynamo cannot follow calls that switch autocast in a body of its graph; operators it can.
_WRAPPED = WrapStyle(kinds=(Autocast,))


@final
@dataclass(frozen=True, slots=True, repr=False)
class Recompute:
    """Computes the region again in the backward, all but what `keep` keeps; same values and gradients, bit for bit.

    Regions in series are recomputed one at a time, each just before its backward. Random numbers are the same in both
    runs, and buffers are written once. As marks on a graph that is compiled whole, the same is said to the compiler.
    """

    keep: Keep = field(default_factory=KeepNothing)

    #: A compiler that reads the marks needs no cut.
    marks_suffice: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.keep) or isinstance(self.keep, type):
            raise OptionError(f"keep is a function from a region to nodes, such as KeepNothing(), not {self.keep!r}")

    def __repr__(self) -> str:
        keep = getattr(self.keep, "__qualname__", None) or repr(self.keep)
        return f"Recompute(keep={keep})"

    def kept(self, region: Region) -> frozenset[Node]:
        """The nodes of the region whose results are kept: what `keep` says, and what reads memory that changes."""
        kept, inside = tuple(self.keep(region)), set(region.nodes)
        for node in kept:
            if node not in inside:
                name = getattr(node, "name", node)
                raise RecomputeError(
                    f"{self.keep!r} keeps {name!r}, which is not in region {region.name!r}; it may keep nodes of the "
                    "region that it is asked about"
                )
        written = names_written(kept)
        for node in kept:
            if node.name in written:
                raise RecomputeError(
                    f"{self.keep!r} keeps {node.name!r}, but {_writer(node)}; keep another node, or write to a copy"
                )
        # A compiler would compute these again from what was written meanwhile.
        needed = set(readers_before_writes(region.nodes)).intersection(keepable(region))
        return frozenset((*filter(gives_tensors, kept), *needed))

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
        """What is saved: the kept nodes, and what the region gives to others."""
        saved = {"recompute": torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE}
        return dict.fromkeys((*self.kept(region), *region.outputs()), saved)

    def holding(self, region: Region, saved: SavedTensors) -> Holding | None:
        """What autograd holds for the region as it is, and recomputed, and what that costs; a plan prints it."""
        return holding_of(region, saved, self.kept(region))

    def _treated(self, body: GraphModule, kept: set[str], site: Site) -> Called:
        pure = () if site.program is None else site.program.pure
        program = Program(body, caller=site.caller, pure=pure)
        _check_body(program, site.region)
        acts = acts_of(program, frozenset())
        # Items of a container that is made elsewhere come in as they are, and inference tensors are never saved.
        modes, number = program.modes, program.index.number
        kept = {node.name for node in program.operators() if node.name in kept and not modes.at(number[node]).inference}
        module = keep_apart(program, kept) if kept else body
        module = wrap_modes(Program(module, caller=site.caller, pure=pure), _WRAPPED).graph_module
        written: tuple[int | str, ...] = (
            *written_inputs(program),
            *_inputs_written_later(body, site.region),
            *_state_written(module, program if site.program is None else site.program),
        )
        note_facts(module, BodyFacts(may_write(program), bool(acts.draws), written, knows_written=True))
        return Called(module, _CHECKPOINT)


def _inputs_written_later(body: GraphModule, region: Region) -> Iterator[int]:
    """The places of inputs that somebody writes to when the region has read them."""
    places = {node.name: place for place, node in enumerate(body.graph.find_nodes(op="placeholder"))}
    for source in region.inputs():
        writer = later_writer(source, region.nodes)
        if writer is None:
            continue
        if source.name not in places:
            raise RecomputeError(
                f"{writer!r} writes to {source.name!r} after region {region.name!r} has read it, so the region would "
                "be recomputed with other values; let it write to a copy, or put both into one region"
            )
        yield places[source.name]


def _state_written(body: GraphModule, program: Program) -> Iterator[str]:
    """The names of parameters and buffers in the body that any node of the program may write."""
    written = set(map(id, program.effects.written_state))
    for name, tensor in (*body.named_parameters(), *body.named_buffers()) if written else ():
        if id(tensor) in written:
            yield name


def _check_body(body: Program, region: Region) -> None:
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
    for node in nodes:
        if node.target is print or node.kwargs.get("generator") is not None:
            what = "prints" if node.target is print else "draws from a generator of its own"
            raise RecomputeError(
                f"node {node.name!r} in region {region.name!r} {what}, which would happen again; leave it out"
            )


def _writer(node: Node) -> str:
    names = writers_of(node)
    return f"{min(names)!r} writes to its memory" if names else "that node writes in place"
