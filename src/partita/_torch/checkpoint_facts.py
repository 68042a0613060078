"""What a body may do beside computing, as far as recomputing it is concerned."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from partita._torch.schemas import signatures_of, signatures_of_method

__all__ = ["BodyFacts", "facts_of", "note_facts"]

_KEY = "partita_recompute"


@dataclass(frozen=True, slots=True)
class BodyFacts:
    """The names of nodes that may write to tensors, whether anything may draw, and what is written.

    Inputs are told by their place, parameters and buffers by their name in the body.
    """

    writers: tuple[str, ...] = ()
    may_draw: bool = True
    #: By the body, or by others when it has run.
    written: tuple[int | str, ...] = ()
    #: Whether all that the body writes is told; if not, it is found out, since torch does not count every write.
    knows_written: bool = False

    @property
    def needs_copies(self) -> bool:
        """Whether the second run needs copies of what the first was given."""
        return bool(self.writers or self.written)


def note_facts(body: GraphModule, facts: BodyFacts) -> None:
    """Keeps what a closer look has found with the body; copies of the body have it too."""
    body.meta[_KEY] = facts


def facts_of(body: Any) -> BodyFacts | None:
    """What is known of `body`; None where it is no graph, so that it may do anything."""
    if not isinstance(body, GraphModule) or "forward" in vars(body):
        return None
    noted = body.meta.get(_KEY)
    if isinstance(noted, BodyFacts):
        return noted
    known = _KNOWN.get(body)
    if known is None or known[0] != (id(body.graph), len(body.graph.nodes)):
        known = _KNOWN[body] = ((id(body.graph), len(body.graph.nodes)), _read(body.graph, body))
    return known[1]


_KNOWN: WeakKeyDictionary[GraphModule, tuple[tuple[int, int], BodyFacts]] = WeakKeyDictionary()


def _read(graph: Graph, owner: GraphModule) -> BodyFacts:
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    writers = tuple(node.name for node in calls if _may_write(node, owner))
    return BodyFacts(writers, any(_may_draw(node, owner) for node in calls))


def _may_write(node: Node, owner: GraphModule) -> bool:
    if node.target in _PLAIN or _is_check(node.target):
        return False
    bodies = list(_bodies(node, owner))
    if bodies:
        return any(facts is None or facts.writers for facts in map(facts_of, bodies))
    signatures = _signatures(node)
    if not signatures or node.kwargs.get("out") is not None:
        return True
    return any(
        argument.written or argument.name in _STATISTICS for signature in signatures for argument in signature.arguments
    )


def _may_draw(node: Node, owner: GraphModule) -> bool:
    if node.target in _PLAIN or _is_check(node.target):
        return False
    bodies = list(_bodies(node, owner))
    if bodies:
        return any(facts is None or facts.may_draw for facts in map(facts_of, bodies))
    signatures = _signatures(node)
    # An operator of somebody else's may draw without saying so.
    named = all(signature.name.startswith("aten::") for signature in signatures)
    return not signatures or not named or any(signature.draws for signature in signatures) or _is_composite(node)


def _is_composite(node: Node) -> bool:
    """Whether an operator's own tags do not speak for the operators that it calls: dropout in attention, say."""
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


def _bodies(node: Node, owner: GraphModule) -> Iterator[Any]:
    """The bodies that an operator runs."""
    if node.op == "call_function" and not isinstance(node.target, OpOverload):
        for given in node.all_input_nodes:
            if given.op == "get_attr":
                held = _held(owner, str(given.target))
                if isinstance(held, torch.nn.Module):
                    yield held


def _held(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def _signatures(node: Node) -> tuple[Any, ...]:
    if node.op == "call_method":
        return signatures_of_method(str(node.target))
    return () if node.op == "call_module" else signatures_of(node.target)


def _is_check(target: Any) -> bool:
    return isinstance(target, OpOverload) and "assert" in target.name()


#: What the norms of torch write in training, which their schemas do not say.
_STATISTICS = ("running_mean", "running_var")

#: Functions of Python that only compute.
_PLAIN = frozenset(
    getattr(operator, name)
    for name in dir(operator)
    if callable(getattr(operator, name)) and not name.startswith("i") and not name.endswith("item__")
) - {operator.setitem, operator.delitem, operator.call} | {operator.getitem, operator.index, operator.invert}
