"""Recompute: the region's results are not kept for the backward but computed again when it needs them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import nn
from torch.fx import GraphModule, Node

import partita.hops as hops
from partita._torch.checkpoint_facts import BodyFacts, may_trace, note_facts, saves_too_soon
from partita._torch.node_tags import next_graph_id
from partita._torch.toggles import ENTER_INFERENCE
from partita.errors import OptionError, RecomputeError
from partita.graphs.attributes import find
from partita.graphs.behaviour_modules import may_draw
from partita.graphs.later_writes import (
    names_written,
    readers_before_writes,
    saved_when_compiled,
    statistics_read_outside,
    writers_of,
)
from partita.graphs.mode import Autocast
from partita.graphs.program import Program
from partita.graphs.projections import takes_item
from partita.graphs.saved_tensors import SavedTensors
from partita.plans.holding import Holding, holding_of
from partita.plans.treatment import Called, Site
from partita.regions import Region
from partita.rewrite.keep_apart import keep_apart
from partita.rewrite.operator_calls import OperatorCall
from partita.rewrite.wrap_modes import WrapStyle, wrap_modes
from partita.treatments.body_facts import acts_of, may_write, written_inputs
from partita.treatments.keep import Keep, KeepNothing, gives_tensors, keepable
from partita.treatments.recompute_copies import inputs_written_later, state_written
from partita.treatments.recompute_refusals import check_body

__all__ = ["Recompute"]

_CHECKPOINT = OperatorCall(hops.wrap_activation_checkpoint)
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
    marks_suffice: ClassVar[bool] = True

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
        needed = set(readers_before_writes(region.nodes)).intersection(keepable(region))
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

    def holding(self, region: Region, saved: SavedTensors) -> Holding | None:
        """What autograd holds for the region as it is, and recomputed, and what that costs; a plan prints it."""
        return holding_of(region, saved, self.kept(region))

    def _treated(self, body: GraphModule, kept: set[str], site: Site) -> Called:
        pure = () if site.program is None else site.program.pure
        program = Program(body, caller=site.caller, pure=pure)
        check_body(program, site.region)
        acts = acts_of(program, frozenset())
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
        facts = BodyFacts(
            may_write(program),
            draws,
            written,
            knows_written=True,
            saves_too_soon=saves_too_soon(module),
            may_trace=may_trace(module),
        )
        note_facts(module, facts)
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
            if not isinstance(module, GraphModule) and may_draw(module):
                return True
    return False


def _writer(node: Node) -> str:
    names = writers_of(node)
    return f"{min(names)!r} writes to its memory" if names else "that node writes in place"
