"""Partitions joint graphs by a plan: marks regions of the forward, then calls torch's partitioner."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias, final
from uuid import uuid4

import torch
from torch.fx import GraphModule, Node

from partita._torch.operators.registry import OPERATORS
from partita._torch.operators.schemas import viewed_node
from partita.analysis.op_effects.calls import CallEffects
from partita.backends._torch.joint_partitioners import (
    drop_forward_effects,
    is_any_recomputed,
    let_inductor_take,
    min_cut_partition,
    plain_partition,
)
from partita.errors import OptionError, RecomputeError
from partita.plans import Policy, Treatment, plan
from partita.plans.treatment import Marks, is_treatment
from partita.program.program import Program
from partita.regions import Region
from partita.regions.joint_forward import forward_part
from partita.rewrite.outline import marked

#: From a joint graph, its inputs and torch's options, `num_fwd_outputs` among them, to a forward and a backward.
Partitioner: TypeAlias = Callable[..., tuple[GraphModule, GraphModule]]


def joint_partition(
    policy: Policy,
    treatment: Treatment | Mapping[str, Treatment] | Callable[[Region], Treatment],
    *,
    then: Partitioner | None = None,
) -> JointPartition:
    """A `partition_fn` for AOTAutograd that marks the regions which `policy` finds in the forward of a joint graph.

    The marked graph is partitioned by `then`, by default torch's `min_cut_rematerialization_partition`, which
    recomputes what is marked so. Inductor takes it as `torch._inductor.config.custom_partitioner_fn`. A joint graph
    that was not functionalized is partitioned so that it mutates as before, or refused with a `RecomputeError`.
    """
    partition = JointPartition(policy, treatment, then)
    let_inductor_take(JointPartition)
    return partition


@final
@dataclass(frozen=True, slots=True)
class JointPartition:
    """A partitioner of joint graphs: a policy, a treatment that marks, and the partitioner called after that.

    Make one with `joint_partition`.
    """

    policy: Policy
    treatment: Treatment | Mapping[str, Treatment] | Callable[[Region], Treatment]
    then: Partitioner | None = None
    #: Identifies all of the above across processes; random where that is impossible.
    _identity: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.policy) or isinstance(self.policy, type):
            raise OptionError(f"a joint graph is planned by a policy such as ByModule('layers.*'), not {self.policy!r}")
        if isinstance(self.treatment, type) or not (
            is_treatment(self.treatment) or isinstance(self.treatment, Mapping) or callable(self.treatment)
        ):
            raise OptionError(f"regions of a joint graph take a treatment that marks, not {self.treatment!r}")
        if self.then is not None and not callable(self.then):
            raise OptionError(f"`then` is a function that partitions a joint graph, not {self.then!r}")
        known = identity_of((self.policy, self.treatment, self.then))
        # Inductor pickles a partitioner into its cache key, so equal partitioners must have equal fields.
        object.__setattr__(self, "_identity", uuid4().hex if known is None else known)

    def __call__(
        self, joint_module: GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        """The forward and the backward."""
        program = Program.of(joint_module, forward_outputs=num_fwd_outputs)
        marked = self.marked(program).graph_module
        if is_functionalized(program):
            cut = min_cut_partition if self.then is None else self.then
            forward, backward = cut(marked, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
            drop_forward_effects(backward)
            return forward, backward
        # torch's min-cut partitioner (2.13) loses mutations; its plain one keeps them, and recomputes nothing here.
        usual = min_cut_partition if is_any_recomputed(marked) else plain_partition
        cut = usual if self.then is None else self.then
        try:
            forward, backward = cut(marked, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
        except AssertionError as error:
            raise not_partitioned(error) from error
        check_mutations(program, forward, backward)
        drop_forward_effects(backward)
        return forward, backward

    def marked(self, program: Program) -> Program:
        """The joint graph with the marks of the plan."""
        part = forward_part(program)
        # Planned without the backward: everything it reads would count as an output of a region.
        decided = plan(part.program, self.policy, self.treatment)
        silent = [treatment for treatment in decided.treatments if not isinstance(treatment, Marks)]
        if silent:
            raise OptionError(
                f"{silent[0]!r} marks nothing, and nothing else can be done to a region of a joint graph while it is "
                "compiled; use a treatment that marks, or `apply` a plan for a program of partita.capture_joint"
            )
        return marked(program, {part.original[node]: own for node, own in decided.marks().items()})

    def uuid(self) -> str:
        """The key of this partitioner in caches of compiled code; it differs for other policies and treatments."""
        return f"partita-{sha256(self._identity.encode()).hexdigest()}"


def identity_of(value: object) -> str | None:
    """A text that is equal in every process exactly for values that behave equally; None where that is unknown.

    It is known for plain values, for operators and functions of torch, and for dataclasses of these, by the source
    files of their classes. What else these files import does not count, unless it belongs to Partita.
    """
    if value is None or isinstance(value, _PLAIN):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, Enum):
        return _joined(type(value).__name__, [_identity_of_class(type(value)), value.name])
    if isinstance(value, OPERATORS):
        return f"operator:{value}"
    if isinstance(value, type):
        return _identity_of_class(value)
    if isinstance(value, FunctionType):
        return _name_in_torch(value)
    if isinstance(value, tuple | list):
        return _joined(type(value).__name__, map(identity_of, value))
    if isinstance(value, set | frozenset):
        items = [identity_of(item) for item in value]
        return None if None in items else _joined("set", sorted(filter(None, items)))
    if isinstance(value, Mapping):
        return _joined("mapping", (identity_of(item) for pair in value.items() for item in pair))
    if is_dataclass(value):
        values = [identity_of(getattr(value, field.name)) for field in fields(value)]
        return _joined(type(value).__name__, [_identity_of_class(type(value)), *values])
    return None


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_OURS = __name__.partition(".")[0]


def _joined(kind: str, parts: Iterable[str | None]) -> str | None:
    known = list(parts)
    return None if None in known else f"{kind}({','.join(part for part in known if part is not None)})"


def _identity_of_class(cls: type) -> str | None:
    name = f"{cls.__module__}.{cls.__qualname__}"
    top = cls.__module__.partition(".")[0]
    if top in ("torch", "builtins"):
        return name
    if top == _OURS:
        return f"{name}@{_digest_of_partita()}"
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    digest = None if file is None else _digest(Path(file))
    return None if digest is None else f"{name}@{digest}"


def _name_in_torch(function: FunctionType) -> str | None:
    """The qualified name of a function of torch; None for others, which may read mutable globals."""
    home = sys.modules.get(function.__module__)
    is_found = getattr(home, function.__name__, None) is function
    is_in_torch = function.__module__.partition(".")[0] == "torch"
    return f"{function.__module__}.{function.__name__}" if is_found and is_in_torch else None


@cache
def _digest_of_partita() -> str:
    """A digest of all of Partita's code: a policy uses most of it."""
    files = sorted(Path(__file__).resolve().parents[1].rglob("*.py"))
    return sha256("".join(_digest(file) or "" for file in files).encode()).hexdigest()[:16]


def _digest(file: Path) -> str | None:
    try:
        return sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return None


# Joint graphs that are not functionalized: their halves must mutate as the joint graph does.


def is_functionalized(program: Program) -> bool:
    """Whether a joint graph mutates nothing but inputs, each after its last read."""
    writers = _mutating_nodes(program)
    return all(_is_input_update(node, program, writers) for node in writers)


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
    acting = CallEffects(program.graph_module, program.pure).effectful(program.graph)
    found = {
        node for node, effects in acting.items() if (effects.mutates or effects.mutated_state) and not effects.unknown
    }
    return {node: None for node in program.index.nodes if node in found}


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
    behind = [index.nodes[number] for number in program.effect_neighbours.after.get(index.number[node], ())]
    return all(
        other.op == "output" or other in writers or viewed_node(other) is not None for other in (*behind, *node.users)
    )


def _positions(half: GraphModule) -> Mapping[str, int]:
    """The position of every computed node of a half, by name."""
    nodes: Sequence[Node] = list(half.graph.nodes)
    return {node.name: place for place, node in enumerate(nodes) if node.op not in ("placeholder", "output")}


def _shown(node: Node) -> str:
    return f"{node.name!r} ({node.target})"
