"""Laws for lowering: whatever is taken and whatever refused, lowered regions are equivalent to the original."""

from __future__ import annotations

from random import Random
from typing import final

from torch.fx import Graph, Node

from partita.analysis.nodes import find
from partita.backends import Backend, find_backend
from partita.equivalence import Difference, compare
from partita.plans import Plan, plan
from partita.policies import ByCapability
from partita.program.program import Program
from partita.program.reordering import summation_tolerance
from partita.testing.generator.draft import Case
from partita.testing.laws.core import LawError
from partita.treatments import Lower


def check_lower_laws(case: Case, backend: str | Backend, seed: int) -> Plan:
    """Raises where the program differs once the backend has what `random_capability` gives it; else the plan.

    The failures of the plan tell what was not compiled, and ran eagerly.
    """
    program, found = Program.of(case.graph_module), find_backend(backend)
    policy = random_capability(program.graph, found, seed)
    lowering = plan(program, policy, Lower(found))
    try:
        after = lowering.apply()
        own = case.copy()
        tolerance = after.tolerance | summation_tolerance(program)
        comparison = compare(program, after, own.args, own.kwargs, tolerance=tolerance)
        counted = statistics_are_counted(lowering)
        assert all(is_allowed(found, counted=counted) for found in comparison.differences), str(comparison)
    except Exception as error:
        title = f"a program lowered by {found.name} is equivalent to the original"
        raise LawError(f"{title}\n{case!r}\n{lowering}\n{type(error).__name__}: {error}") from error
    return lowering


def is_allowed(difference: Difference, *, counted: bool, other_errors: bool = False) -> bool:
    """Compiled code has gradients where autograd refuses them for a view whose base was written in secret.

    Other treatments may refuse them with `other_errors`. Where compiled code writes statistics that a norm has saved
    which is not compiled, autograd refuses the backward, as it does where `torch.compile` compiles one of two calls of
    a norm (2.13).
    """
    if difference.kind != "exception" or difference.where != "backward":
        return False
    if counted and "modified by an inplace operation" in difference.detail:
        return True
    if difference.detail.endswith("!= no exception"):
        return True
    return other_errors and not difference.detail.startswith("no exception")


def statistics_are_counted(lowering: Plan) -> bool:
    """Whether a norm runs eagerly, where its writes are not counted, and is called by a lowered region too."""
    program, owner = lowering.program, lowering.partition.owner
    lowered = {place for place, treatment in enumerate(lowering.treatments) if isinstance(treatment, Lower)}
    inside, outside = set[int](), set[int]()
    for number, node in enumerate(program.index.nodes):
        module = find(program.graph_module, str(node.target)) if node.op == "call_module" else None
        statistics = getattr(module, "running_mean", None)
        if statistics is not None:
            (inside if owner[number] in lowered else outside).add(id(statistics))
    return not inside.isdisjoint(outside)


def random_capability(graph: Graph, backend: Backend, seed: int) -> ByCapability:
    """The policy of that number: what the backend takes, less some nodes at random, for one taker or for two."""
    source = Random(seed)
    ranks = {node: source.random() for node in graph.nodes}
    share = source.choice((0.0, 0.1, 0.3, 0.6))
    connected = source.random() < 0.3
    smallest, largest = source.choice((1, 1, 2, 4)), source.choice((None, None, 5))
    devices_apart = source.random() < 0.7
    shares = (0.6, share / 2) if source.random() < 0.4 else (share,)
    return ByCapability(
        tuple(_Picky(backend, ranks, refused) for refused in shares),
        connected=connected,
        smallest=smallest,
        largest=largest,
        devices_apart=devices_apart,
    )


@final
class _Picky:
    """Refuses what the backend refuses, and this share of the other nodes."""

    def __init__(self, backend: Backend, ranks: dict[Node, float], share: float) -> None:
        self._backend, self._ranks, self._share = backend, ranks, share
        self.__name__ = f"{backend.name}_{share:.0%}".removesuffix("%")

    def __call__(self, node: Node) -> str | None:
        return "no" if self._ranks[node] < self._share else self._backend.refusal(node)
