"""Partitions joint graphs by a plan: marks regions of the forward, then calls torch's partitioner."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias, final
from uuid import uuid4

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from partita._torch.operator_schemas import OPERATORS
from partita.analysis.projections import with_items
from partita.backends._torch.partitioners import (
    drop_forward_effects,
    is_any_recomputed,
    let_inductor_take,
    min_cut_partition,
    plain_partition,
)
from partita.backends._torch.settings import digest_of_partita
from partita.errors import OptionError
from partita.plans import Policy, Treatment, plan
from partita.plans.treatment import Marks, is_treatment
from partita.program.program import Program
from partita.regions import Region
from partita.regions.joint_forward import forward_part
from partita.rewrite.outline import marked
from partita.torch_compile.joint_mutations import (
    check_mutations,
    check_recomputed_reads,
    is_functionalized,
    nodes_before_updates,
    not_partitioned,
)

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
            check_recomputed_reads(program, forward, backward)
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
        marks = {part.original[node]: own for node, own in decided.marks().items()}
        # torch's partitioners (2.13) recompute from inputs that the forward updates at its end.
        for node in with_items(nodes_before_updates(program), set(program.index.nodes)):
            marks[node] = {**marks.get(node, {}), "recompute": CheckpointPolicy.MUST_SAVE}
        return marked(program, marks)

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
        return f"{name}@{digest_of_partita()}"  # A policy uses most of it.
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    digest = None if file is None else _digest(Path(file))
    return None if digest is None else f"{name}@{digest}"


def _name_in_torch(function: FunctionType) -> str | None:
    """The qualified name of a function of torch; None for others, which may read mutable globals."""
    home = sys.modules.get(function.__module__)
    is_found = getattr(home, function.__name__, None) is function
    is_in_torch = function.__module__.partition(".")[0] == "torch"
    return f"{function.__module__}.{function.__name__}" if is_found and is_in_torch else None


def _digest(file: Path) -> str | None:
    try:
        return sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return None
