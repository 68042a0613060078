"""What it takes to run a body twice with the same result: copies of what is mutated, and the RNG state.

It is computed once for each body and stored with it; the treatment `Recompute`, which knows the call site,
annotates the body with more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

from partita._torch.fx.structural_hash import annotate, annotation
from partita._torch.operator_schemas import is_higher_order, is_of_other_library, signatures_of
from partita.analysis.effects.modules import may_use_rng
from partita.program.program import Program

#: Dynamo does not trace the code of this module: it runs around bodies, after a graph break.
DYNAMO_SKIPS = True


_KEY = "checkpoint"


@final
@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """What it takes to run a body twice; inputs go by position, parameters and buffers by name."""

    #: The names of nodes that may mutate, in order.
    mutating: tuple[str, ...] = ()
    #: Whether the RNG state is preserved: a node may use the RNG.
    preserves_rng: bool = True
    #: What the body mutates, or other code after it has run: it needs copies of these.
    mutated_inputs: tuple[int, ...] = ()
    mutated_state: tuple[str, ...] = ()
    #: Whether these are complete; if not, mutations are detected at run time, since version counters miss some.
    is_complete: bool = False
    #: Whether an operator mutates a tensor after saving it, so that recomputation must not stop at the last saving.
    saves_before_mutation: bool = False
    #: Whether an operator runs a body of its own, and may trace its backward when it is called.
    may_trace: bool = False

    @property
    def may_mutate(self) -> bool:
        """Whether the body or later code may mutate what a second run reads."""
        return bool(self.mutating or self.mutated_inputs or self.mutated_state)


def plan_of_body(body: Any) -> CheckpointPlan | None:
    """The plan for `body`; None where it is no graph, so that it may have any effects.

    Queried at every call, so the result is cached until code is generated anew: an edited graph runs only then.
    """
    if not isinstance(body, GraphModule) or "forward" in vars(body):
        return None
    code = _code_of(body)
    known = _KNOWN.get(body)
    if known is not None and known[0] == code:
        return known[1]
    # Dynamo would try to trace the analysis, where it is active.
    analyse = (
        torch.compiler.disable(_annotated_or_analysed) if "torch._dynamo" in sys.modules else _annotated_or_analysed
    )
    plan = analyse(body)
    if not any(map(_awaits_code, body.modules())):
        _KNOWN[body] = (code, plan)
    return plan


def checkpoint_plan(
    body: GraphModule,
    program: Program,
    *,
    mutated_inputs: tuple[int, ...] = (),
    mutated_state: tuple[str, ...] = (),
    is_complete: bool = False,
) -> CheckpointPlan:
    """The plan for a body that computes what this program does."""
    return CheckpointPlan(
        tuple(dict.fromkeys((*program.mutations.mutating_nodes(), *_calls_with_buffers(program)))),
        bool(program.effects.rng_nodes) or _may_use_rng_untagged(body),
        mutated_inputs,
        mutated_state,
        is_complete,
        saves_before_mutation(body),
        _may_trace(body),
    )


def annotate_plan(body: GraphModule, plan: CheckpointPlan) -> None:
    """Stores a plan with a body, where it holds until the body is edited."""
    data = (
        plan.mutating,
        plan.preserves_rng,
        plan.mutated_inputs,
        plan.is_complete,
        plan.saves_before_mutation,
        plan.may_trace,
    )
    annotate(body, _KEY, data, plan.mutated_state)
    _KNOWN.pop(body, None)


def saves_before_mutation(body: nn.Module) -> bool:
    """Whether a body, or a module inside, calls RReLU in some form: it saves its noise before generating it."""
    if any(isinstance(module, nn.RReLU) for module in body.modules()):
        return True
    nodes = (node for graph in _graphs_in(body) for node in graph.nodes)
    return any("rrelu" in str(getattr(node.target, "__name__", node.target)) for node in nodes)


#: By body: its code when it was analysed, and the result.
_KNOWN: WeakKeyDictionary[GraphModule, tuple[tuple[object, ...], CheckpointPlan]] = WeakKeyDictionary()


def _code_of(body: GraphModule) -> tuple[object, ...]:
    """The `forward` functions of a body and the modules inside; torch makes a new function for each edit."""
    if not body._modules:
        return (type(body).forward,)
    return tuple([vars(module).get("forward", type(module).forward) for module in body.modules()])


def _awaits_code(module: nn.Module) -> bool:
    """Whether `forward` is still the function that generates the code, so that edits do not replace it."""
    return isinstance(module, _LazyGraphModule) and module._needs_recompile()


def _annotated_or_analysed(body: GraphModule) -> CheckpointPlan:
    found = annotation(body, _KEY)
    if found is None:
        return checkpoint_plan(body, Program(body))
    (mutating, preserves_rng, mutated_inputs, *flags), mutated_state = found
    return CheckpointPlan(mutating, preserves_rng, mutated_inputs, mutated_state, *flags)


def _calls_with_buffers(program: Program) -> Iterator[str]:
    """The calls of modules that may update buffers when they are set to training."""
    for node in program.graph.find_nodes(op="call_module"):
        if next(program.calls.called_module(node).buffers(), None) is not None:
            yield node.name


def _graphs_in(body: nn.Module) -> Iterator[Graph]:
    return (module.graph for module in body.modules() if isinstance(module, GraphModule))


def _may_trace(body: nn.Module) -> bool:
    """Whether a body, or a graph inside, calls a higher-order operator, such as `scan`, other than Partita's own."""
    targets = (node.target for graph in _graphs_in(body) for node in graph.nodes)
    return any(is_higher_order(target) and not getattr(target, "only_runs_body", False) for target in targets)


def _may_use_rng_untagged(body: GraphModule) -> bool:
    """Whether a node may use the RNG although its schema does not say so.

    An operator of another library may lack the tag; a module, in a body that an operator runs too, may be set to
    training.
    """
    for part in body.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            if node.op == "call_module":
                module = part.get_submodule(str(node.target))
                if not isinstance(module, GraphModule) and may_use_rng(module):
                    return True
            elif node.op == "call_function" and any(map(is_of_other_library, signatures_of(node.target))):
                return True
    return False
