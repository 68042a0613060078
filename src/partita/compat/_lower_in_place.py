"""Lowers regions in place: they become calls in their module, compiled when they are first called.

Everything is prepared before a module is changed; then its graph is replaced in one step, or edited to match.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import nn
from torch.fx import Graph, GraphModule, Node, Tracer

from partita._torch.nn_modules import StandsForBody
from partita.lowering.lower import Lower
from partita.plans.compilations import Failures
from partita.plans.treatment import Site, treated
from partita.program.program import UNMOVED, StateKeys
from partita.regions import Partition, Region
from partita.rewrite.bodies import BodyStyle
from partita.rewrite.outline import OutlineStyle, outlined
from partita.rewrite.state import MovedByPart, name_state, rewrite_in_place

#: The key of the record in the `meta` of a module with lowered regions.
_KEY = "partita_lowering"

#: Inputs of bodies are named by position, as in torch's partial lowering.
_NUMBERED_INPUTS = OutlineStyle(body=BodyStyle(keeps_input_names=False))


@final
@dataclass(frozen=True, slots=True)
class Record:
    """The failures in the lowered regions of a module, and the original keys of state that moved into them."""

    failures: Failures = field(default_factory=Failures)
    state_keys: StateKeys = UNMOVED


@final
@dataclass(frozen=True, slots=True)
class Prepared:
    """A module, its new graph, the submodules that the new graph calls, and the record for its `meta`."""

    root: GraphModule
    graph: Graph
    called: Mapping[str, nn.Module]
    record: Record
    #: The nodes of the old graph that are in no region.
    outside: Collection[Node] = ()


def record_of(gm: GraphModule) -> Record:
    """The record of a module; an empty one if nothing of it is lowered."""
    found = gm.meta.get(_KEY)
    return found if isinstance(found, Record) else Record()


def prepare(
    partition: Partition,
    names: Sequence[str],
    lower: Callable[[Region, GraphModule], Lower],
    *,
    is_tagged: bool = False,
) -> Prepared:
    """The module with each region as a call under one of these `names`, lowered as `lower` decides for region and body.

    With `is_tagged`, the calls carry the tag of the treatment as their keyword `tag`.
    """
    program, known = partition.program, record_of(partition.program.graph_module)
    cut = outlined(partition, names=names, style=_NUMBERED_INPUTS)
    moved = MovedByPart(cut.moved)
    called: dict[str, nn.Module] = {}
    tags: dict[str, str | None] = {}
    for place, (name, region, body) in enumerate(zip(names, partition, cut.bodies, strict=True)):
        treatment = lower(region, body)
        named = Region(name, region.nodes, region.label)
        site = Site(named, program, place, len(names), program.caller, known.failures)
        called[name], tags[name] = treated(treatment, body, site).module, treatment.tag
        moved.settle(name, body, called[name])
    graph = cut.graph_module.graph
    for node in graph.find_nodes(op="call_module") if is_tagged else ():
        if isinstance(called.get(str(node.target)), StandsForBody):
            node.kwargs = {"tag": tags[str(node.target)]}
    record = Record(known.failures, known.state_keys.then(moved.settled))
    outside = [node for node, place in zip(program.index.nodes, partition.owner, strict=True) if place < 0]
    return Prepared(program.graph_module, graph, called, record, outside)


def commit(prepared: Sequence[Prepared], *, edits_graphs: bool = False) -> None:
    """Installs the new graphs in all modules, or, where one fails, in none; state dicts keep their names.

    With `edits_graphs`, a module keeps its graph and the nodes that are in no region, edited to match the new one.
    """
    before = [(one.root, one.root.graph, dict(one.root._modules)) for one in prepared]
    try:
        for one in prepared:
            for name, module in one.called.items():
                one.root.add_module(name, module)
            one.root.graph = one.graph
            one.graph.lint()
    except BaseException:
        for root, graph, children in before:
            root._modules.clear()
            root._modules.update(children)
            root.graph = graph
        raise
    for one, (root, graph, _) in zip(prepared, before, strict=True):
        if edits_graphs:
            rewrite_in_place(graph, one.graph, kept=one.outside)
            root.graph = graph
        _keep_calls_in_pickles(one.root)
        name_state(one.root, one.record.state_keys, naming="original")
        one.root.meta[_KEY] = one.record


def _keep_calls_in_pickles(root: GraphModule) -> None:
    """Makes torch unpickle a module, which it does by tracing its code, with a tracer that keeps calls of submodules.

    It uses the tracer class of the original trace. Those with their own `call_module`, as `make_fx` has, trace into
    every submodule (torch 2.13), so that nothing would be lowered in the loaded module.
    """
    tracer = root.graph._tracer_cls
    if tracer is not None and tracer.call_module is not Tracer.call_module:
        root.graph._tracer_cls = root._tracer_cls = None
