"""Checks that the forward and backward of a partitioned joint graph mutate as the joint graph does.

AOTAutograd functionalizes joint graphs; only updates of inputs remain, which torch's partitioners handle. A graph
traced without functionalization mutates as the model does, and a partitioner may lose, repeat or reorder a mutation.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import final

import torch
from torch.fx import GraphModule, Node

from partita._torch.operator_schemas import viewed_node
from partita.errors import RecomputeError
from partita.program.program import Program, effect_neighbours


def is_functionalized(program: Program) -> bool:
    """Whether a joint graph mutates nothing but inputs, each after its last read."""
    writers = _mutating_nodes(program)
    return all(_is_input_update(node, program, writers) for node in writers)


def nodes_before_updates(program: Program) -> list[Node]:
    """The nodes of the forward that compute something from an input or attribute before it is updated."""
    joint, mutations = program.joint, program.mutations
    assert joint is not None
    return [
        node
        for node in joint.forward
        if node.name in mutations.saved_when_compiled and node.name not in mutations.mutating
    ]


def check_recomputed_reads(program: Program, forward: GraphModule, backward: GraphModule) -> None:
    """Raises where a partitioner recomputes a value from an input that the forward has updated."""
    if not program.mutations.mutators:
        return
    updated = {name for name in _updated_inputs(program) if name in {node.name for node in forward.graph.nodes}}
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in updated:
            raise RecomputeError(
                f"the partitioner saves the input {node.name!r} for backward, which the forward updates, so that "
                "gradients would be wrong: a copy of it was removed, as Inductor does (torch 2.13). Keep what is "
                "computed from the copy, or mutate after the backward"
            )
    for wrong in _Halves(program, forward, backward).recomputed_after_updates():
        raise RecomputeError(
            f"the partitioner {wrong}, so that gradients would be wrong; omit `then`, and torch's partitioner, which "
            "reads marks, is used"
        )


def _updated_inputs(program: Program) -> Iterator[str]:
    """The names of the inputs that the forward mutates."""
    joint = program.joint
    forward = set() if joint is None else {node.name for node in joint.forward}
    for node in program.graph.find_nodes(op="placeholder"):
        if not forward.isdisjoint(program.mutations.mutators_of(node)):
            yield node.name


def check_mutations(program: Program, forward: GraphModule, backward: GraphModule) -> None:
    """Raises where the halves of a joint graph that is not functionalized mutate differently from it."""
    halves = _Halves(program, forward, backward)
    for wrong in (*halves.misplaced_mutations(), *halves.stale_reads(), *halves.reordered()):
        raise RecomputeError(
            f"the joint graph is not functionalized, and the partitioner {wrong}, so that gradients or state would be "
            f"wrong; {_WAY_OUT}"
        )


def not_partitioned(error: AssertionError) -> RecomputeError:
    """The error for a partitioner that fails on a joint graph that is not functionalized."""
    return RecomputeError(f"the joint graph is not functionalized, and the partitioner fails: {error}; {_WAY_OUT}")


_WAY_OUT = (
    "let AOTAutograd functionalize it (disable_functionalization=False), or mark nothing to be recomputed and "
    "omit `then`"
)


@final
class _Halves:
    """A joint graph, the nodes that mutate in it, and the positions of its nodes in forward and backward."""

    def __init__(self, program: Program, forward: GraphModule, backward: GraphModule) -> None:
        self.program = program
        self.writers = _mutating_nodes(program)
        self.halves = (_positions(forward), _positions(backward))
        #: The numbers of the nodes that may mutate the memory of each node, in graph order.
        number = {node.name: place for place, node in enumerate(program.index.nodes)}
        mutators = ((node, program.mutations.mutators_of(node)) for node in program.index.nodes)
        self._writes = {node: sorted(map(number.__getitem__, names)) for node, names in mutators if names}

    def misplaced_mutations(self) -> Iterator[str]:
        """Every mutation happens once, in its own half."""
        joint = self.program.joint
        late = set() if joint is None else set(joint.backward)
        for node in self.writers:
            found = [node.name in half for half in self.halves]
            if not any(found):
                yield f"loses the mutation {_shown(node)}"
            elif all(found):
                yield f"repeats the mutation {_shown(node)} in the backward"
            elif found[1] is not (node in late):
                yield f"moves the mutation {_shown(node)} to the {'backward' if found[1] else 'forward'}"

    def stale_reads(self) -> Iterator[str]:
        """Recomputed nodes read unmutated memory, and their results are not mutated."""
        for number, node in enumerate(self.program.index.nodes):
            found = [node.name in half for half in self.halves]
            if node.op in ("placeholder", "get_attr", "output") or viewed_node(node) is not None:
                continue
            later = [source for source in node.all_input_nodes if self._writes.get(source, (-1,))[-1] > number]
            if all(found) and (later or node in self._writes):
                mutated = later[0] if later else node
                yield f"recomputes {_shown(node)} although {mutated.name!r} is mutated meanwhile"
            if not any(found) and self._is_used(node) and any(map(self._writes.get, node.all_input_nodes)):
                yield f"takes another value for {_shown(node)}, which reads memory that is mutated"

    def recomputed_after_updates(self) -> Iterator[str]:
        """No node is recomputed from what the forward mutates after it."""
        index, forward = self.program.index, self.halves[0]
        for number, node in enumerate(index.nodes):
            if viewed_node(node) is not None or not all(node.name in half for half in self.halves):
                continue
            for source in node.all_input_nodes:
                later = [at for at in self._writes.get(source, ()) if at > number]
                if any(index.nodes[at].name in forward for at in later):
                    yield f"recomputes {_shown(node)} although the forward mutates {source.name!r}"

    def reordered(self) -> Iterator[str]:
        """Accesses to mutated memory keep their order."""
        nodes, (forward, backward) = self.program.index.nodes, self.halves
        for before, after in self.program.effects.edges():
            first, second = nodes[before], nodes[after]
            if not {first, second} & self.writers.keys() or viewed_node(first) or viewed_node(second):
                continue
            runs_late = first.name in backward and first.name not in forward
            same = [half for half in self.halves if first.name in half and second.name in half]
            if (runs_late and second.name in forward) or any(half[first.name] > half[second.name] for half in same):
                yield f"runs {_shown(second)} before {_shown(first)}"

    def _is_used(self, node: Node) -> bool:
        return any(user.op == "output" or any(user.name in half for half in self.halves) for user in node.users)


def _mutating_nodes(program: Program) -> dict[Node, None]:
    """The nodes that are known to mutate, in graph order."""
    nodes = (program.index.nodes[number] for number in program.calls.mutated)
    return {node: None for node in nodes if not program.calls.of(node).unknown}


#: How AOTAutograd updates inputs at the end of a graph.
_UPDATES = (torch.ops.aten.copy_.default, torch.ops.aten.set_.source_Tensor)
#: Namespaces of operators that mutate by design, in functionalized graphs as well: FSDP's unsharded parameters.
_MUTATING_NAMESPACES = ("fsdp.", "inductor.")


def _is_input_update(node: Node, program: Program, writers: Container[Node]) -> bool:
    if str(node.target).startswith(_MUTATING_NAMESPACES):
        return True
    first = node.args[0] if node.args else None
    if node.target not in _UPDATES or not isinstance(first, Node) or first.op != "placeholder":
        return False
    index = program.index
    behind = [index.nodes[number] for number in program.once(effect_neighbours).after.get(index.number[node], ())]
    return all(
        other.op == "output" or other in writers or viewed_node(other) is not None for other in (*behind, *node.users)
    )


def _positions(half: GraphModule) -> Mapping[str, int]:
    """The position of every computed node of a half, by name."""
    nodes: Sequence[Node] = list(half.graph.nodes)
    return {node.name: place for place, node in enumerate(nodes) if node.op not in ("placeholder", "output")}


def _shown(node: Node) -> str:
    return f"{node.name!r} ({node.target})"
