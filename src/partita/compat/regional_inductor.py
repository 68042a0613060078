"""`torch.fx.passes.regional_inductor`: marked regions are compiled by Inductor, the rest runs as it is."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from partita._torch.boxed_calls import take_inputs_in_a_list
from partita._torch.lowering_fakes import stand_ins
from partita._torch.pause_gc import gc_paused
from partita._torch.regional_output import for_the_cache, is_kept_in_the_cache, modes_of_compiled_graphs
from partita.compat._fused_groups import checked_module, free_names
from partita.compat._lower_in_place import Prepared, commit, prepare
from partita.compat._marked_regions import MarkedRegions, marked_modules
from partita.graphs.values import value_of
from partita.regions import Region
from partita.runtime.lowered import Lowered
from partita.treatments.lower import Lower

__all__ = ["regional_inductor"]


@gc_paused()
def regional_inductor(gm: GraphModule, *example_args: object) -> GraphModule:
    """`gm` itself, in which regions marked with `compile_with_inductor` are compiled when they are first called.

    Nodes are marked by `torch.fx.traceback.annotate`. Options of Inductor stand under `inductor_configs`, and nodes
    with different ones are compiled apart, as are those with different names under `inductor_region`. Bodies of
    operators, like the branches of a condition, are treated too. It is a compiler for AOTAutograd, forward and
    backward: where something is marked, the graph takes its inputs in a list as well. The example arguments are not
    used. Works in place: all of it is done, or nothing.

    Where AOTAutograd keeps what it compiles (`force_autograd_cache`), regions are compiled at once, and the result is
    what torch keeps: its `RegionalOutputCode` around `gm`.
    """
    found = {module: MarkedRegions(module) for module in marked_modules(checked_module(gm, "regions are compiled in"))}
    prepared = {module: _prepared(regions) for module, regions in found.items() if len(regions.partition)}
    if gm in prepared:
        take_inputs_in_a_list(prepared[gm].graph)
    commit(list(prepared.values()))
    if not is_kept_in_the_cache():
        return gm
    for one in prepared.values():
        _compile_now(one)
    kept: GraphModule = for_the_cache(gm)
    return kept


def _compile_now(prepared: Prepared) -> None:
    """Compiles the regions for the values that were traced, so that what is kept holds the compiled functions."""
    with modes_of_compiled_graphs():
        for node in prepared.graph.find_nodes(op="call_module"):
            called = prepared.called.get(str(node.target))
            if isinstance(called, Lowered) and all(value_of(read) is not None for read in node.all_input_nodes):
                inputs = stand_ins([value_of(read) if isinstance(read, Node) else read for read in node.args])
                if inputs is not None:
                    called.compile_for(inputs)


def _prepared(regions: MarkedRegions) -> Prepared:
    root = regions.partition.program.graph_module

    def lower(region: Region, body: GraphModule) -> Lower:
        return Lower(regions.backend_of(region))

    return prepare(regions.partition, free_names(root, "inductor_region_", len(regions.partition)), lower)
