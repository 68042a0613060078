"""A drop-in replacement for `torch.fx.passes.utils.fuser_utils`, with its names, arguments and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from torch.fx import Graph, GraphModule, Node

from partita._torch.fx.graph_writer import input_nodes
from partita._torch.gc_pause import gc_paused
from partita.analysis.index import index_of_edited
from partita.compat._fused_groups import (
    FusionError,
    check_call,
    check_node,
    check_together,
    checked_module,
    checked_nodes,
    free_name,
    free_names,
    record_owned,
)
from partita.errors import BrokenGraphError, ModeError
from partita.program.program import EffectSuccessors, effect_neighbours, effect_successors, program_being_edited
from partita.rewrite.fuse import FusedStyle, fuse, fused_body, is_trivial, mode_of_call
from partita.rewrite.in_place import insert_call
from partita.solvers.quotient import stable_order

__all__ = [
    "erase_nodes",
    "fuse_as_graphmodule",
    "fuse_by_partitions",
    "insert_subgm",
    "legalize_graph",
    "topo_sort",
    "validate_partition",
]


NodeList = list[Node]


def topo_sort(nodes: NodeList) -> NodeList:
    """The nodes after their inputs and with their effects in order; otherwise in their order in the list."""
    return _sorted_nodes(nodes)


def validate_partition(partition: NodeList) -> bool:
    """Whether the nodes can run in one call: nothing outside must run in between, by data or by effects."""
    nodes = list(partition)
    if not nodes:
        return True
    inside, successors = set(nodes), _effect_successors_in(nodes[0].graph)
    seen: set[Node] = set()
    while nodes:
        node = nodes.pop()
        for after in (*node.users, *successors.get(node, ())):
            if after in inside:
                if node not in inside:
                    return False
            elif after not in seen:
                seen.add(after)
                nodes.append(after)
    return True


def fuse_as_graphmodule(
    gm: GraphModule,
    nodes: NodeList,
    module_name: str,
    partition_lookup_table: dict[Node, int | None] | None = None,
    *,
    always_return_tuple: bool = False,
) -> tuple[GraphModule, tuple[Node, ...], tuple[Node, ...]]:
    """The nodes as a module whose class is called `module_name`, its inputs, and the nodes that its outputs replace.

    `gm` is not changed. The nodes run in one mode, in which the module must be called. A placeholder among the nodes
    becomes an input that the module owns, as in torch: it is not among the returned inputs.
    """
    program = program_being_edited(checked_module(gm))
    held = checked_nodes(gm, nodes, f"the partition {module_name!r}")
    if partition_lookup_table is not None and set(partition_lookup_table) != set(held):
        odd = set(partition_lookup_table).symmetric_difference(held)
        raise FusionError(f"nodes and partition_lookup_table differ in {', '.join(sorted(map(str, odd)))}")
    check_together(program, [held], [module_name])
    numbers = [program.index.number[node] for node in _sorted_nodes(held, effect_successors(program))]
    mode = mode_of_call(program, numbers)
    if mode is None or not program.modes.toggles.isdisjoint(numbers):
        raise ModeError(
            f"the nodes of {module_name!r} run in several modes, or switch them, so it matters where the module will "
            "be called; exclude toggles and fuse each mode apart, or use `fuse_by_partitions`, which sets modes anew"
        )
    body = fused_body(program, numbers, FusedStyle(module_name, mode, returns_tuple=always_return_tuple))
    record_owned(body.module, held)
    body.module.meta[_FUSED] = tuple(node.name for node in held)
    return body.module, body.inputs, body.outputs


def insert_subgm(
    gm: GraphModule,
    sub_gm: GraphModule,
    orig_inputs: tuple[Node, ...],
    orig_outputs: tuple[Node, ...],
    insertion_point: Node | None = None,
) -> GraphModule:
    """`gm` with a call of `sub_gm`, which is named after its class, and whose results replace `orig_outputs`.

    Works in place. The replaced nodes stay: erase them with `erase_nodes`. Where the name is taken by another module,
    the next free number is used. Without an `insertion_point` the call comes after the last of `orig_outputs`, or
    before that where another node must see the effects of the fused nodes.
    """
    checked_module(gm)
    checked_module(sub_gm, "what is inserted is")
    inputs, outputs = list(orig_inputs), list(orig_outputs)
    for called, nodes in (("orig_inputs", inputs), ("orig_outputs", outputs)):
        for node in nodes:
            check_node(gm, node, called)
    check_call(sub_gm, inputs, outputs)
    if insertion_point is None:
        if not outputs:
            raise FusionError(
                "Cannot determine insertion point: no insertion_point provided and orig_outputs is empty. "
                "Pass the last partition node as insertion_point."
            )
        insertion_point = _point_by_effects(gm, sub_gm, inputs, max(outputs))
    check_node(gm, insertion_point, "insertion_point")
    is_bare = len(outputs) == 1 and not isinstance(sub_gm.graph.output_node().args[0], tuple)
    insert_call(gm, sub_gm, free_name(gm, sub_gm), inputs, outputs, after=insertion_point, is_bare=is_bare)
    return gm


#: In the metadata of a fused module: the names of the nodes in it.
_FUSED = "partita_fused"


def _point_by_effects(gm: GraphModule, sub_gm: GraphModule, inputs: list[Node], last: Node) -> Node:
    """The node after which fused nodes are called, such that other nodes see their effects and they those of others."""
    names = frozenset(sub_gm.meta.get(_FUSED, ()))
    program = program_being_edited(gm)
    number, nodes = program.index.number, program.index.nodes
    fused = {at for at, node in enumerate(nodes) if node.name in names}
    after = {at for each in fused for at in program.once(effect_neighbours).after.get(each, ())} - fused
    if not after or min(after) > number[last]:
        return last
    before = {at for each in fused for at in program.once(effect_neighbours).before.get(each, ())} - fused
    inputs_of_graph = gm.graph.find_nodes(op="placeholder")
    earliest = max((*before, *(number[node] for node in (*inputs, *inputs_of_graph[-1:]))), default=-1)
    if earliest < 0 or earliest >= min(after):
        raise FusionError(
            f"no place for the call of {type(sub_gm).__name__}: {nodes[min(after)].name!r} must run after it, and "
            f"comes before {nodes[max(earliest, 0)].name!r}, which must run before it; pass an insertion_point, or use "
            "`fuse_by_partitions`, which moves nodes"
        )
    return nodes[earliest]


def erase_nodes(gm: GraphModule, nodes: NodeList) -> None:
    """Erases the nodes, in any order; raises, and erases none, if another node uses one of them."""
    held = dict.fromkeys(nodes)
    for node in held:
        check_node(checked_module(gm), node, "the list")
        others = [user.name for user in node.users if user not in held]
        if others:
            raise BrokenGraphError(
                f"Tried to erase Node {node} but it still had {len(others)} users in the graph: {', '.join(others)}; "
                "replace it there first, or erase them too"
            )
    for node in reversed(_sorted_nodes(sorted(held), {})):
        gm.graph.erase_node(node)


def legalize_graph(gm: GraphModule) -> GraphModule:
    """`gm` with its nodes in an order in which they can run; in place.

    A node moves only if it comes before one of its inputs, or after the output. Nodes that mutate or use RNG state keep
    their order as far as data allows; torch sorts all nodes anew and ignores effects.
    """
    nodes = index_of_edited(checked_module(gm).graph).nodes
    before: Node | None = None
    for node in nodes:
        first = next(iter(gm.graph.nodes))
        if before is None and node is not first:
            first.prepend(node)
        elif before is not None and before.next is not node:
            before.append(node)
        before = node
    gm.recompile()
    return gm


@gc_paused()
def fuse_by_partitions(
    gm: GraphModule,
    partitions: Iterable[Mapping[Node, int | None] | Sequence[Node]],
    prefix: str = "fused_",
    always_return_tuple: bool = False,
) -> GraphModule:
    """`gm` with every partition as a call of a submodule, named by `prefix` and its place in the list.

    Works in place: all partitions are fused, or, where one cannot be, none. Empty ones are skipped. Where a module
    of an earlier run has one of the names, numbering continues after the highest.
    """
    program = program_being_edited(checked_module(gm))
    listed, number = list(partitions), program.index.number
    names = free_names(gm, prefix, len(listed))
    groups: dict[str, list[Node]] = {}
    for name, partition in zip(names, listed, strict=True):
        # An input of the graph stays one, and is passed to the submodule.
        held = [node for node in checked_nodes(gm, partition, f"the partition {name!r}") if node.op != "placeholder"]
        if any(not is_trivial(program, number[node]) for node in held):
            groups[name] = held
    if not groups:
        return gm if program.index.nodes == list(gm.graph.nodes) else legalize_graph(gm)
    check_together(program, list(groups.values()), list(groups))
    successors = effect_successors(program)
    numbers = [[number[node] for node in _sorted_nodes(group, successors)] for group in groups.values()]
    fuse(program, numbers, list(groups), returns_tuple=always_return_tuple)
    return gm


def _sorted_nodes(nodes: Iterable[Node], successors: EffectSuccessors | None = None) -> list[Node]:
    """The nodes in topological order by data and effects; where there is a choice, in the order of `nodes`.

    Without `successors`, the effect successors in the graph of the nodes are used.
    """
    held = list(nodes)
    if _is_in_graph_order(held):
        return held
    if successors is None:
        successors = _effect_successors_in(held[0].graph)
    place = {node: at for at, node in enumerate(held)}
    edges = [
        (at, place[later])
        for node, at in place.items()
        for later in (*node.users, *successors.get(node, ()))
        if later in place
    ]
    order = [held[at] for at in stable_order({at: at for at in place.values()}, edges)]
    if len(order) != len(held):
        raise FusionError(
            "topological sorted nodes doesn't have same length as input nodes: "
            f"{len(held)} were given, {len(order)} can be sorted; name each node once"
        )
    return order


def _effect_successors_in(graph: Graph) -> EffectSuccessors:
    """The effect successors of each node; none where the graph has no module, or is broken."""
    root = graph.owning_module
    if not isinstance(root, GraphModule) or root.graph is not graph:
        return {}
    try:
        return effect_successors(program_being_edited(root))
    except BrokenGraphError:
        return {}


def _is_in_graph_order(nodes: Sequence[Node]) -> bool:
    """Whether the nodes are in graph order, and their graph in topological order."""
    if any(node._erased or node.graph is not nodes[0].graph for node in nodes):
        return False
    if not all(before < after for before, after in pairwise(nodes)):
        return False
    return all(read < node for node in nodes for read in input_nodes(node))
