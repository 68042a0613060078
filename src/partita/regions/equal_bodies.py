"""Which regions of a partition have equal bodies, up to names and values of weights, and which can share one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from partita._torch.fx.structural_hash import settings_of
from partita.analysis.nodes import bodies_read, body_read, find
from partita.program.program import Program
from partita.program.structure import Structure, structure_of
from partita.regions.borders import Constant, Crossing, Item
from partita.regions.partition import Partition
from partita.regions.region import Region


def body_numbers(partition: Partition) -> list[int]:
    """A number for each region, the same for those with equal bodies, from 0 on in the order of the regions.

    Equal bodies have the same nodes in the same order, read and return the same of their values in the same order, and
    agree in which of their inputs are the same, share a storage or are mutated later.
    """
    known: dict[Hashable, int] = {}
    structure = partition.program.once(structure_of)
    loose = {number: structure.loose[number] for number in partition.constants}
    return [
        known.setdefault(_key(partition, at, numbers, structure, loose), len(known))
        for at, numbers in enumerate(partition.numbers())
    ]


def passing_differing_numbers(partition: Partition) -> Partition:
    """The same partition, in which numbers that alone make bodies differ are inputs of the regions, where possible."""
    structure, nodes = partition.program.once(structure_of), partition.program.index.nodes
    alike: dict[Hashable, list[list[int]]] = {}
    for at, numbers in enumerate(partition.numbers()) if structure.loose else ():
        alike.setdefault(_key(partition, at, numbers, structure, structure.loose), []).append(numbers)
    differing = [
        number
        for regions in alike.values()
        for same in zip(*regions, strict=True)
        if same[0] in structure.loose and len({structure.letters[number] for number in same}) > 1
        for number in same
    ]
    return partition.passing_numbers(nodes[number] for number in differing) if differing else partition


def has_repeats(partition: Partition) -> bool:
    """Whether two regions have equal bodies."""
    return may_repeat(partition) and len(set(body_numbers(partition))) < len(partition)


def may_repeat(partition: Partition) -> bool:
    """Whether two regions call the same functions in the same order, which is cheap to see."""
    return len({_functions_of(region) for region in partition.regions}) < len(partition)


def shareable_bodies(partition: Partition) -> list[int]:
    """For each region the first one whose body it can call, with its own inputs; itself if there is none.

    The nodes of one body carry one set of metadata, so beside equal bodies the two regions have the same symbols, and
    the same marks on their nodes. A body that calls modules, or holds tensors, is called by its own region alone.
    """
    regions, found = partition.regions, list(range(len(partition)))
    if not may_repeat(partition):
        return found
    structure = partition.program.once(structure_of)
    first: dict[Hashable, list[int]] = {}
    root, in_bodies = partition.program.graph_module, dict[GraphModule, Hashable]()
    for at, body in enumerate(body_numbers(partition)):
        if not partition.borders.of_regions[at].outputs or _holds_state(partition, at):
            continue
        symbols, marks = tuple(_symbols(partition, at, structure)), _marks_key(regions[at].nodes, root, in_bodies)
        like = first.setdefault((body, symbols, marks), [])
        same = (known for known in like if _have_same_marks(partition, regions[known], regions[at]))
        found[at] = next(same, at)
        if found[at] == at:
            like.append(at)
    return found


def _key(
    partition: Partition, at: int, numbers: Sequence[int], structure: Structure, loose: Mapping[int, int]
) -> Hashable:
    """Equal for regions with equal bodies, if the numbers of the nodes in `loose` do not count."""
    letters, local = structure.letters, dict[int, int]()
    wiring = local_mentions(structure, numbers, local)
    nodes = [(loose.get(number, letters[number]), *read) for number, read in zip(numbers, wiring, strict=True)]
    border = partition.borders.of_regions[at]
    inputs = tuple(_crossings(border.inputs, local))
    outputs = tuple(_crossings(border.outputs, local))
    mutated = tuple(
        sorted(local[number] for number in mutated_later(partition.program, partition.regions[at]) if number in local)
    )
    return tuple(nodes), inputs, outputs, mutated


def local_mentions(structure: Structure, numbers: Iterable[int], local: dict[int, int]) -> Iterator[list[int]]:
    """What each of these nodes mentions, numbered in the order in which they mention or make it; `local` is filled."""
    for number in numbers:
        yield [local.setdefault(mentioned, len(local)) for mentioned in structure.mentions[number]]
        local.setdefault(number, len(local))


def _crossings(crossings: Iterable[Crossing], local: dict[int, int]) -> Iterator[Hashable]:
    for crossing in crossings:
        if isinstance(crossing, int):
            yield local.setdefault(crossing, len(local))
        elif isinstance(crossing, Constant):
            yield "constant", local[crossing.number]
        else:
            place = crossing.place if isinstance(crossing, Item) else crossing.axis
            yield type(crossing).__name__, local.setdefault(crossing.number, len(local)), place


def mutated_later(program: Program, region: Region) -> Iterator[int]:
    """The nodes of a region, and those it reads, that other nodes mutate later."""
    mutations, number = program.mutations, program.index.number
    if not mutations.mutators:
        return
    names = mutations.names_mutated_outside(region.nodes)
    yield from (number[node] for node in region.nodes if node.name in names)
    yield from (number[node] for node in mutations.later_mutators(region.inputs(), region.nodes))


def _functions_of(region: Region) -> Hashable:
    return tuple([(node.op, node.target) for node in region.nodes if node.op == "call_function"])


def _symbols(partition: Partition, at: int, structure: Structure) -> Iterator[int]:
    """The symbols in the values of a region and of its inputs, in order."""
    border, nodes = partition.borders.of_regions[at], partition.regions[at].nodes
    number = partition.program.index.number
    known = (crossing for crossing in border.inputs if not isinstance(crossing, Constant))
    inputs = (crossing if isinstance(crossing, int) else crossing.number for crossing in known)
    for mentioning in (*inputs, *(number[node] for node in nodes)) if structure.symbols else ():
        yield from (other for other in structure.mentions[mentioning] if other in structure.symbols)


def _holds_state(partition: Partition, at: int) -> bool:
    """Whether a region calls modules, or operators with bodies that hold tensors or have hooks."""
    program, border = partition.program, partition.borders.of_regions[at]
    if any(node.op == "call_module" for node in partition.regions[at].nodes):
        return True
    read = (find(program.graph_module, str(program.index.nodes[number].target)) for number in border.modules)
    return any(_has_tensors(module) for body in read if isinstance(body, nn.Module) for module in body.modules())


def _has_tensors(module: nn.Module) -> bool:
    if module._parameters or module._buffers or not isinstance(module, GraphModule):
        return True
    return any(isinstance(value, Tensor) for _, value in settings_of(module))


def _have_same_marks(partition: Partition, one: Region, other: Region) -> bool:
    root = partition.program.graph_module
    return _are_marked_alike(one.nodes, other.nodes, root, root)


def _are_marked_alike(ours: Iterable[Node], theirs: Iterable[Node], root: nn.Module, other_root: nn.Module) -> bool:
    """Whether nodes have the same metadata, but for their values and where they come from; in their bodies, too."""
    for one, other in zip_longest(ours, theirs):
        if one is None or other is None or not _is_same(_marks(one), _marks(other)):
            return False
        if len(one.all_input_nodes) != len(other.all_input_nodes):
            return False
        for read, same in zip(one.all_input_nodes, other.all_input_nodes, strict=True):
            inner, other_inner = body_read(root, read), body_read(other_root, same)
            if inner is None or other_inner is None or read.target == same.target:
                continue
            if not _are_marked_alike(inner.graph.nodes, other_inner.graph.nodes, inner, other_inner):
                return False
    return True


def _marks_key(nodes: Iterable[Node], root: nn.Module, in_bodies: dict[GraphModule, Hashable]) -> Hashable:
    """Equal for nodes that are marked alike; so a region is compared with few others, however many are equal to it."""
    found = list[Hashable]()
    for node in nodes:
        found.append(plain_key(_marks(node)))
        for _, body in bodies_read(root, node.all_input_nodes):
            if body not in in_bodies:
                in_bodies[body] = hash(_marks_key(body.graph.nodes, body, in_bodies))
            found.append(in_bodies[body])
    return tuple(found)


def plain_key(value: Any, levels: int = 100, known: dict[tuple[int, int], int] | None = None) -> Hashable:
    """Equal for equal values, for all that are no plain data, and below so many levels: a value may hold itself."""
    match value:
        case str() | None:
            return value
        case float() if not value.is_integer():
            return repr(value) if value == value else id(value)  # A NaN equals itself alone.
        case int() | float():
            return hex(int(value))  # Python's hashes of many integers are equal.
        case dict() | list() | tuple() if levels:
            known = {} if known is None else known
            place = id(value), levels  # What is held often is visited once.
            if place not in known:
                known[place] = _hash_of_items(value, levels - 1, known)
            return known[place]
    return ""


def _hash_of_items(value: Any, levels: int, known: dict[tuple[int, int], int]) -> int:
    if isinstance(value, dict):
        return hash(frozenset((key, plain_key(item, levels, known)) for key, item in value.items()))
    return hash((isinstance(value, list), *(plain_key(item, levels, known) for item in value)))


def _marks(node: Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key not in _NO_MARKS}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal; those that cannot be compared are not."""
    try:
        return bool(one == other)
    except Exception:  # The comparison may be anybody's code.
        return False


#: Metadata about values, which are compared as structure, and about where a node comes from.
_NO_MARKS = frozenset(
    (
        "creation_timestamp",
        "desc",
        "eager_input_vals",
        "example_value",
        "from_node",
        "fwd_nn_module_stack",
        "fwd_source_fn_stack",
        "nn_module_stack",
        "original_aten",
        "seq_nr",
        "source_fn_stack",
        "stack_trace",
        "tensor_meta",
        "torch_fn",
        "unbacked_bindings",
        "val",
    )
)
