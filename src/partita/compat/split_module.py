"""A drop-in replacement for `torch.fx.passes.split_module`, with its names, arguments and results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from partita._torch import toggles
from partita._torch.fx.graph_writer import FreeNames
from partita._torch.gc_pause import gc_paused
from partita.analysis.modes import only_argument, traced_grad
from partita.errors import CallbackError, CycleError, MissingLabelError, ModeError, OptionError, listed
from partita.program.program import Program
from partita.regions import Partition as RegionPartition
from partita.regions import Region
from partita.rewrite.bodies import BodyStyle
from partita.rewrite.outline import Outlined, OutlineStyle, outlined
from partita.solvers.quotient import quotient

__all__ = ["Partition", "split_module", "split_module_simple"]


log = logging.getLogger(__name__)


class Partition:
    """The record of one part, with torch's fields; logged at debug level."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.submod_name = f"submod_{name}"
        self.node_names: list[str] = []
        self.inputs: dict[str, None] = {}
        self.outputs: dict[str, None] = {}
        self.dependencies: dict[str, None] = {}
        self.dependents: dict[str, None] = {}
        self.graph = Graph()
        self.environment: dict[Node, Node] = {}
        self.targets: dict[str, Any] = {}

    def __repr__(self) -> str:
        rows = {
            "name": self.name,
            " nodes": self.node_names,
            " inputs": self.inputs,
            " outputs": self.outputs,
            " partitions depended on": self.dependencies,
            " partition dependents": self.dependents,
        }
        return ",\n".join(f"{title}: {row}" for title, row in rows.items())


@gc_paused()
def split_module(
    m: GraphModule,
    root_m: torch.nn.Module | None,
    split_callback: Callable[[Node], int | str],
    qualname_map: dict[str, str] | None = None,
    keep_original_order: bool | None = False,
    keep_original_node_name: bool | None = False,
    keep_original_input_name: bool = True,
    *,
    partition_affix: str | None = None,
    tuple_return: bool = False,
) -> GraphModule:
    """A new module in which the nodes for which `split_callback` returns one id run as one submodule.

    `root_m` is not used. The callback is called once per operator, in graph order. `m` is not changed; parameters and
    buffers are shared. `qualname_map` is filled with the old name of every module that moved into a part.
    """
    program = _program_of(m)
    operators = program.operators()
    labels = _labels(split_callback, operators)
    partition = _partition(program, _parts(operators, labels, partition_affix))
    body = BodyStyle(
        keeps_node_names=bool(keep_original_node_name),
        keeps_input_names=keep_original_input_name,
        returns_tuple=tuple_return,
        caller_grad=_caller_grad(m),
    )
    order = _original_order(partition) if keep_original_order else _lifo_order(partition)
    _log_mode_regions(operators, labels)
    cut = _outlined(partition, order, body, attributes_first=not keep_original_order)
    if qualname_map is not None:
        qualname_map.update(cut.moved)
    return cut.graph_module


@gc_paused()
def split_module_simple(
    m: GraphModule, node_to_partition: Mapping[Node, int], *, partition_affix: str | None = None
) -> GraphModule:
    """A new module cut by a mapping from operators to part ids; parts follow in order of first appearance."""
    if not isinstance(node_to_partition, Mapping):
        raise OptionError(f"node_to_partition maps nodes to part ids; {type(node_to_partition).__name__} is no mapping")
    program = _program_of(m)
    operators = program.operators()
    missing = [node.name for node in operators if node_to_partition.get(node) is None]
    if missing:
        raise MissingLabelError(f"node_to_partition has no id for {listed(missing, 5)}; give every operator one")
    parts = _parts(operators, [node_to_partition[node] for node in operators], partition_affix)
    partition = _partition(program, parts)
    body = BodyStyle(keeps_node_names=False, returns_tuple=False, caller_grad=_caller_grad(m))
    return _outlined(partition, _alone_first(partition, partition.order), body, attributes_first=True).graph_module


def _program_of(m: GraphModule) -> Program:
    if not isinstance(m, GraphModule):
        raise OptionError(
            f"a torch.fx.GraphModule can be split, not {type(m).__name__}; an exported program through its module()"
        )
    return Program.of(m)


def _caller_grad(m: GraphModule) -> bool | None:
    """True for a graph that was traced with gradients on: parts restore that by a constant, as torch's passes need."""
    return True if traced_grad(m) else None


def _labels(split_callback: Callable[[Node], int | str], nodes: Sequence[Node]) -> list[int | str]:
    """The part id of each node, queried once, in order."""
    labels: list[int | str] = []
    try:
        for node in nodes:
            labels.append(split_callback(node))
    except Exception as error:
        name = nodes[len(labels)].name
        raise CallbackError(
            f"split_callback raised {type(error).__name__} for node {name!r}: {error}; nothing was changed"
        ) from error
    if None in labels:
        name = nodes[labels.index(None)].name  # type: ignore[arg-type]
        raise CallbackError(f"split_callback returned None for node {name!r}; return a part id for every operator")
    return labels


def _parts(nodes: Sequence[Node], labels: Sequence[int | str], affix: str | None) -> list[Region]:
    """The parts in order of first appearance; ids with the same text are one part."""
    held: dict[str, list[Node]] = {}
    # Most labels are small integers; formatting one for each node would cost more than a lookup.
    by_number: dict[int, list[Node]] = {}
    for node, label in zip(nodes, labels, strict=True):
        part = by_number.get(label) if type(label) is int else None
        if part is None:
            name = str(label) if affix is None else f"{affix}_{label}"
            part = held.setdefault(name, [])
            if type(label) is int:
                by_number[label] = part
        part.append(node)
    return [Region(f"submod_{name}", tuple(part), name) for name, part in held.items()]


def _partition(program: Program, parts: Sequence[Region]) -> RegionPartition:
    """The parts; one that holds only getitems stays a part of its own, unless that would create a cycle."""
    try:
        return RegionPartition(program, parts, keeps_item_regions=True)
    except CycleError:
        return RegionPartition(program, parts)


def _names(partition: RegionPartition) -> list[str]:
    """The names of the parts; one that is taken by an attribute outside is numbered."""
    index, owner = partition.program.index, partition.owner
    moved = {number for border in partition.borders.of_regions for number in border.modules}
    taken = {
        str(node.target).partition(".")[0]
        for node in index.graph.find_nodes(op="get_attr")
        if index.number[node] not in moved or any(owner[index.number[user]] < 0 for user in node.users)
    }
    free = FreeNames(taken.__contains__)
    return [free.take(region.name) for region in partition]


def _log_mode_regions(nodes: Sequence[Node], labels: Sequence[int | str]) -> None:
    """Logs, at debug level, the parts that each autocast block and each grad mode covers, by the node that opens it."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    autocasts: dict[Node, dict[int | str, None]] = {}
    grads: dict[Node, dict[int | str, None]] = {}
    modes = NOTHING_OPEN
    for node, label in zip(nodes, labels, strict=True):
        before, modes = modes, modes.after(node)
        for opener in dict.fromkeys((*before.blocks, *modes.blocks)):
            if opener.target is toggles.ENTER_AUTOCAST:
                autocasts.setdefault(opener, {})[label] = None
        if modes.grad is not None:
            grads.setdefault(modes.grad, {})[label] = None
    for title, regions in (("autocast_regions", autocasts), ("grad_regions", grads)):
        log.debug("%s: %s", title, {opener: list(parts) for opener, parts in regions.items()})


def _outlined(partition: RegionPartition, order: Sequence[int], body: BodyStyle, *, attributes_first: bool) -> Outlined:
    """The module that torch would return, with the names of the parts in its metadata."""
    style = OutlineStyle(
        body=body,
        attributes_first=attributes_first,
        keeps_outer_names=False,
        annotates_output=False,
        keeps_unused_state=False,
    )
    cut = outlined(partition, names=_names(partition), order=order, style=style)
    cut.graph_module.meta["partition_names"] = set(cut.names)
    for record in _records(cut, partition) if log.isEnabledFor(logging.DEBUG) else ():
        log.debug("%s", record)
    return cut


def _records(cut: Outlined, partition: RegionPartition) -> list[Partition]:
    nodes = partition.program.index.nodes
    records = [Partition(str(region.label)) for region in partition]
    for record, region, border, body in zip(records, partition, partition.borders.of_regions, cut.bodies, strict=True):
        record.node_names = [node.name for node in region.nodes]
        record.inputs = {nodes[crossing].name: None for crossing in border.inputs if isinstance(crossing, int)}
        record.outputs = {nodes[crossing].name: None for crossing in border.outputs if isinstance(crossing, int)}
        record.graph = body.graph
        record.targets = dict(body.named_children())
    for before, after in partition.quotient.causes:
        if before < len(records) and after < len(records):
            records[before].dependents[records[after].name] = None
            records[after].dependencies[records[before].name] = None
    return records


def _lifo_order(partition: RegionPartition) -> list[int]:
    """Last in, first out over the parts that are ready; torch's order, kept unless it violates an effect dependency."""
    index, parts = partition.program.index, len(partition)
    every = _between_parts(partition.quotient.causes, parts)
    if not len(partition.program.effects.before):
        return _alone_first(partition, _lifo(parts, every))
    order = _lifo(parts, _between_parts(quotient(partition.owner, parts, index.edges()).causes, parts))
    place = {part: at for at, part in enumerate(order)}
    if any(place[before] > place[after] for before, after in every):
        order = _lifo(parts, every)
    return _alone_first(partition, order)


def _original_order(partition: RegionPartition) -> list[int]:
    """Parts by first appearance, each after the attributes that it is the first to read."""
    parts, nodes = len(partition), partition.program.index.nodes
    order: dict[int, None] = {}
    for vertex in partition.order:
        if vertex < parts:
            for crossing in partition.borders.of_regions[vertex].inputs:
                if isinstance(crossing, int) and nodes[crossing].op == "get_attr":
                    order.setdefault(parts + crossing)
            order.setdefault(vertex)
        elif nodes[vertex - parts].op != "get_attr":
            order.setdefault(vertex)
    # An attribute that only the output uses comes last; one that is unused outside of parts is dropped, as in torch:
    # parts have modules of their own.
    number, owner = partition.program.index.number, partition.owner
    late = (vertex for vertex in partition.order if vertex not in order)
    return [*order, *(at for at in late if any(owner[number[user]] < 0 for user in nodes[at - parts].users))]


def _alone_first(partition: RegionPartition, order: Iterable[int]) -> list[int]:
    """The parts in this order, after all nodes outside of parts: attributes, and items of the inputs."""
    parts = len(partition)
    alone = [vertex for vertex in partition.order if vertex >= parts]
    return [*alone, *(vertex for vertex in order if vertex < parts)]


def _between_parts(edges: Iterable[tuple[int, int]], parts: int) -> list[tuple[int, int]]:
    return [(before, after) for before, after in edges if before < parts and after < parts]


def _lifo(parts: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    waits = [0] * parts
    successors: list[list[int]] = [[] for _ in range(parts)]
    for before, after in edges:
        waits[after] += 1
        successors[before].append(after)
    ready = [part for part in range(parts) if not waits[part]]
    order = []
    while ready:
        part = ready.pop()
        order.append(part)
        for after in successors[part]:
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)
    return order


# The mode blocks that are open where a graph is cut in order: a part exits them, and the next one reenters them.

_ENTERS = frozenset((toggles.ENTER_AUTOCAST, toggles.ENTER_INFERENCE))
_EXITS = frozenset((toggles.EXIT_AUTOCAST, toggles.EXIT_INFERENCE))


@dataclass(frozen=True, slots=True)
class OpenModes:
    """The nodes that entered the open blocks, in order, and the last node that set the grad mode."""

    blocks: tuple[Node, ...] = ()
    grad: Node | None = None
    #: What `grad` was where each open inference block was entered: exiting the block restores it.
    grad_before: tuple[tuple[Node, Node | None], ...] = ()
    #: Blocks on one device that are still open although a block around them was exited.
    crossed: frozenset[Node] = frozenset()

    def after(self, node: Node) -> OpenModes:
        """What is open after `node`."""
        if node.op != "call_function":
            return self
        if node.target is toggles.SET_GRAD:
            return replace(self, grad=node)
        if node.target in _ENTERS:
            return self._entered(node)
        return self._exited(only_argument(node, "mode")) if node.target in _EXITS else self  # type: ignore[arg-type]

    def to_reenter(self, first: Node) -> tuple[Node, ...]:
        """The toggles that a part which begins with `first` repeats: torch repeats the grad mode last."""
        if self.crossed:
            names = ", ".join(sorted(repr(node.name) for node in self.crossed))
            raise ModeError(
                f"the graph is cut before {first.name!r}, where autocast blocks cross: {names} is still open after a "
                "block around it was left; leave blocks in the reverse of the order in which they were entered"
            )
        if self.grad is None or first.target is toggles.SET_GRAD:
            return self.blocks
        # A grad mode that is a value of the graph needs no repetition: parts run in graph order.
        if not isinstance(only_argument(self.grad, "enabled"), bool):
            return self.blocks
        later = [block for block in self.blocks if block.target is toggles.ENTER_INFERENCE and block > self.grad]
        place = self.blocks.index(later[0]) if later else len(self.blocks)
        return (*self.blocks[:place], self.grad, *self.blocks[place:])

    def _entered(self, node: Node) -> OpenModes:
        if node.target is toggles.ENTER_AUTOCAST:
            return replace(self, blocks=(*self.blocks, node))
        if not node.users:
            return self  # Its handle is dropped at once, which ends the block.
        return replace(self, blocks=(*self.blocks, node), grad_before=(*self.grad_before, (node, self.grad)))

    def _exited(self, entered: Node) -> OpenModes:
        inner = self.blocks[self.blocks.index(entered) + 1 :]
        crossed = self.crossed.union(node for node in inner if _device(node) == _device(entered))
        return OpenModes(
            tuple(block for block in self.blocks if block is not entered),
            dict(self.grad_before).get(entered, self.grad),
            tuple(pair for pair in self.grad_before if pair[0] is not entered),
            crossed - {entered},
        )


def _device(entered: Node) -> object:
    return entered.args[0] if entered.args else entered.kwargs.get("device_type")


NOTHING_OPEN = OpenModes()
