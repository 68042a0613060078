"""A drop-in replacement for `torch.fx.passes.regional_inductor`: Inductor compiles marked regions.

`torch.fx.traceback.annotate({"compile_with_inductor": ...})` marks them; the rest runs eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch.fx import GraphModule, Node

from partita._torch.fx.lazy_graph_module import take_inputs_in_a_list
from partita._torch.gc_pause import gc_paused
from partita.analysis.nodes import bodies_read, value_of
from partita.backends._torch.fake_inputs import stand_ins
from partita.backends.backend import Backend
from partita.backends.inductor import Inductor
from partita.compat._fused_groups import checked_module, free_names
from partita.compat._lower_in_place import Prepared, commit, prepare
from partita.compat._torch.regional_output import cacheable, is_cached, modes_of_compiled_graphs
from partita.errors import OptionError
from partita.lowering.lower import Lower
from partita.lowering.lowered import Lowered
from partita.policies.by_capability import ByCapability
from partita.program.program import Program
from partita.regions import Partition, Region

__all__ = ["regional_inductor"]


log = logging.getLogger(__name__)

_MARK = "compile_with_inductor"


@gc_paused()
def regional_inductor(gm: GraphModule, *example_args: object) -> GraphModule:
    """`gm` itself, in which regions marked with `compile_with_inductor` are compiled when they are first called.

    Nodes are marked by `torch.fx.traceback.annotate`. `inductor_configs` holds options of Inductor, and nodes with
    different ones are compiled apart, as are those with different names under `inductor_region`. Bodies of
    operators, like the branches of a condition, are treated too. It is a compiler for AOTAutograd, forward and
    backward: where something is marked, the graph takes its inputs in a list as well. The example arguments are not
    used. Works in place: all of it is done, or nothing.

    Where AOTAutograd caches what it compiles (`force_autograd_cache`), regions are compiled at once, and the result is
    what torch caches: its `RegionalOutputCode` around `gm`.
    """
    found = {module: MarkedRegions(module) for module in marked_modules(checked_module(gm, "regions are compiled in"))}
    prepared = {module: _prepared(regions) for module, regions in found.items() if len(regions.partition)}
    if gm in prepared:
        take_inputs_in_a_list(prepared[gm].graph)
    commit(list(prepared.values()))
    if not is_cached():
        return gm
    for one in prepared.values():
        _compile_now(one)
    cached: GraphModule = cacheable(gm)
    return cached


def _compile_now(prepared: Prepared) -> None:
    """Compiles the regions for the traced values, so that the cache holds the compiled functions."""
    with modes_of_compiled_graphs():
        for node in prepared.graph.find_nodes(op="call_module"):
            called = prepared.called.get(str(node.target))
            if isinstance(called, Lowered) and all(value_of(read) is not None for read in node.all_input_nodes):
                inputs = stand_ins([value_of(read) if isinstance(read, Node) else read for read in node.args])
                if inputs is not None:
                    called.compile_for(inputs)


def _prepared(regions: MarkedRegions) -> Prepared:
    root = regions.partition.program.graph_module

    names = free_names(root, "inductor_region_", len(regions.partition))
    return prepare(regions.partition, names, lambda region, body: Lower(regions.backend_of(region)))


def is_marked(node: Node) -> bool:
    """Whether the node is to be compiled."""
    custom = node.meta.get("custom")
    return node.op not in ("placeholder", "output") and isinstance(custom, Mapping) and _MARK in custom


def marked_modules(gm: GraphModule) -> list[GraphModule]:
    """`gm` and the bodies of its operators that hold marked nodes, except the bodies of marked operators."""
    found: dict[GraphModule, None] = {}
    waiting = [gm]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            reads = bodies_read(module, module.graph.find_nodes(op="get_attr"))
            waiting += [body for read, body in reads if not all(map(is_marked, read.users))]
    return [module for module in found if any(map(is_marked, module.graph.nodes))]


@final
class MarkedRegions:
    """The fewest regions that hold all marked nodes of a module that Inductor accepts.

    Nodes with different options are apart, and so are nodes with different names of their regions.
    """

    def __init__(self, gm: GraphModule) -> None:
        program = Program.of(gm)
        marked = _Marked({node: _label(node) for node in program.operators() if is_marked(node)}, {})
        for node, label in marked.labels.items():
            if label not in marked.backends:
                marked.backends[label] = _backend(node)
        self._marked = marked
        cut = ByCapability(marked, apart=marked.labels.get)
        self.partition = cut(program) if marked.labels else Partition(program, [])
        for node, reason in self.partition.reasons.items():
            if node in marked.labels and marked(node) is not None:
                log.warning("%s is marked with %r and runs eagerly: %s", node, _MARK, reason)

    def backend_of(self, region: Region) -> Backend:
        """Inductor with the options of a region."""
        labels = self._marked.labels
        return self._marked.backends[next(labels[node] for node in region.nodes if node in labels)]


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Marked:
    """The label of each marked node, and the backend of each label, which may refuse nodes."""

    labels: dict[Node, Hashable]
    backends: dict[Hashable, Backend]

    @property
    def __name__(self) -> str:
        return next(iter(self.backends.values())).name

    def __call__(self, node: Node) -> str | None:
        if node not in self.labels:
            return f"not marked with {_MARK!r}"
        return self.backends[self.labels[node]].refusal(node)


def _label(node: Node) -> Hashable:
    """The name and the options that the nodes of one region share."""
    value = node.meta["custom"][_MARK]
    name = value.get("inductor_region") if isinstance(value, Mapping) else None
    try:
        hash(name)
    except TypeError as error:
        raise OptionError(
            f"the annotation of {node.name!r} calls its 'inductor_region' {name!r}, which is not hashable; "
            "give it a name or a number"
        ) from error
    return name, repr(sorted(_options(node).items(), key=repr))


def _options(node: Node) -> Mapping[str, Any]:
    value = node.meta["custom"][_MARK]
    found = value.get("inductor_configs") if isinstance(value, Mapping) else None
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise OptionError(
            f"the annotation of {node.name!r} has the 'inductor_configs' {found!r}; give a mapping from names of "
            "Inductor's options to their values"
        )
    return found


def _backend(node: Node) -> Backend:
    try:
        return Inductor(_options(node))
    except OptionError as error:
        raise OptionError(f"Invalid inductor config key in the annotation of {node.name!r}: {error}") from error
