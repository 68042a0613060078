"""Intermediate values that Inductor writes to memory, although only fused kernels read them.

A value that several operators read is computed once, in a buffer, if its expression reads more buffers than a setting
of Inductor allows. The buffer is memory unless one kernel holds all of its readers. A kernel can hold one reduction
over the last dimensions and what is computed from it. A reader that waits for another reduction, such as the gradient
of a group norm, or for a product that reads another reader, is in a later kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor
from torch.fx import Node

from partita.analysis.nodes import value_of
from partita.memory._torch.inductor import argument_of, is_reduction, most_reads
from partita.memory.joint.model import JointModel


def realized_values(model: JointModel, order: Sequence[Node], saved: Collection[Node]) -> frozenset[Node]:
    """The large values of one half that are in memory because of what they read and who waits for them."""
    if not model.fuses:
        return frozenset()
    place, limit = {node: at for at, node in enumerate(order)}, most_reads()
    reads: dict[Node, frozenset[Node]] = {}
    found: set[Node] = set()
    for node in order:
        if node not in model.fusible:
            continue
        read: set[Node] = set()
        for one in node.all_input_nodes:
            base = model.base.get(one, one)
            read |= reads.get(base, frozenset((base,)))
        is_own = model.is_materialized(node, saved) or is_reduction(node)
        if not is_own and _count_of_readers(model, node, place) > 1 and len(read) > limit:
            is_own = True
            if node not in model.small and _is_read_by_several_kernels(model, node, place, saved):
                found.add(node)
        if not is_own:
            reads[node] = frozenset(read)
    return frozenset(found)


def _count_of_readers(model: JointModel, node: Node, inside: Collection[Node]) -> int:
    """The most operators that read a value, or one view of it."""
    most, todo = 0, [node]
    while todo:
        users = [user for user in todo.pop().users if user in inside]
        most = max(most, len(users))
        todo += [user for user in users if user in model.views]
    return most


def _is_read_by_several_kernels(
    model: JointModel, node: Node, place: Mapping[Node, int], saved: Collection[Node]
) -> bool:
    """Whether a reader of a value waits for another one: for a kernel of its own, or for more than one reduction."""
    direct = _inlined_into(model, node, place, saved)
    end = max((place[one] for one in direct), default=-1)
    todo = [(user, 0) for user in node.users if user in place]
    seen = set(todo)
    while todo:
        one, passed = todo.pop()
        if one not in model.views and one not in model.fusible:
            passed = 2
        elif is_reduction(one):
            passed = 1 if passed == 0 and _is_over_last(one) else 2
        elif passed == 2 and one in direct:
            return True
        new = {(user, passed) for user in one.users if place.get(user, end + 1) <= end} - seen
        seen |= new
        todo += new
    return False


def _inlined_into(model: JointModel, node: Node, place: Mapping[Node, int], saved: Collection[Node]) -> set[Node]:
    """The pointwise operators whose expressions read a value."""
    found: set[Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            is_pointwise = user in model.views or (user in model.fusible and not is_reduction(user))
            if user in place and is_pointwise and user not in found:
                found.add(user)
                if user in model.views or not model.is_materialized(user, saved):
                    todo.append(user)
    return found


def _is_over_last(node: Node) -> bool:
    """Whether a reduction is over the last dimensions of what it reads, one or several."""
    read = value_of(node.all_input_nodes[0]) if node.all_input_nodes else None
    dims = argument_of(node, "dim")
    if not isinstance(read, Tensor) or dims is None:
        return True
    chosen = {dim % max(read.dim(), 1) for dim in (dims if isinstance(dims, tuple | list) else [dims])}
    return chosen == set(range(read.dim() - len(chosen), read.dim()))
