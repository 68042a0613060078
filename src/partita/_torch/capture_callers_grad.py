"""The caller's grad mode, where a model has read it and sets it again later.

A trace has only the value in its hands, a plain True. What is off in a trace with gradients off is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch.fx import Graph, GraphModule, Node

from partita._torch import toggles
from partita._torch.capture_recorder import Seen

__all__ = ["GradSwitch", "GradTrace", "ask_for_callers_grad"]


@final
@dataclass(frozen=True, slots=True)
class GradSwitch:
    """A toggle that switches gradients on: where its graph is in the module, and which node it is there."""

    path: str
    place: int


@final
@dataclass(slots=True)
class GradTrace:
    """Whether gradients were on at each operator of a traced graph and of its bodies."""

    grads: list[bool | None] = field(default_factory=list)
    #: By switch: the number of the first operator that it holds for.
    holds_for: dict[GradSwitch, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph_module: GraphModule, seen: Mapping[Node, Seen]) -> GradTrace:
        """What a trace has shown; operators that torch has added afterwards were not seen."""
        trace = cls()
        for path, graph in _graphs(graph_module):
            in_force = _InForce(path)
            for place, node in enumerate(graph.nodes):
                if not in_force.take(node, place) and node in seen:
                    if in_force.switch is not None:
                        trace.holds_for.setdefault(in_force.switch, len(trace.grads))
                    trace.grads.append(seen[node].grad)
        return trace


class _InForce:
    """The switch that a place of a graph owes it to that gradients are on, also by way of blocks that put them back."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.switch: GradSwitch | None = None
        self.before: dict[Any, GradSwitch | None] = {}

    def take(self, node: Node, place: int) -> bool:
        """Takes note of a node; whether it is a toggle."""
        if node.target in (toggles.IS_GRAD_ENABLED, toggles.ENTER_INFERENCE):
            self.before[node] = self.switch
        if node.target is toggles.ENTER_INFERENCE:
            self.switch = None
        elif node.target is toggles.EXIT_INFERENCE:
            self.switch = self.before.get(node.args[0])
        elif node.target is toggles.SET_GRAD:
            is_literal = node.args[0] is True
            self.switch = GradSwitch(self.path, place) if is_literal else self.before.get(node.args[0])
        return node.target in toggles.TOGGLES or node.target is toggles.IS_GRAD_ENABLED


def ask_for_callers_grad(graph_module: GraphModule, switches: Iterable[GradSwitch]) -> None:
    """Makes toggles set what the grad mode was at the start of their graph, in place of a constant."""
    graphs = dict(_graphs(graph_module))
    nodes = {path: list(graph.nodes) for path, graph in graphs.items()}
    asked: dict[str, Node] = {}
    for switch in switches:
        if switch.path not in asked:
            asked[switch.path] = _ask_first(graphs[switch.path])
        nodes[switch.path][switch.place].args = (asked[switch.path],)


def _graphs(graph_module: GraphModule) -> list[tuple[str, Graph]]:
    modules = graph_module.named_modules()
    return [(path, module.graph) for path, module in modules if isinstance(module, GraphModule)]


def _ask_first(graph: Graph) -> Node:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        asked = graph.call_function(toggles.IS_GRAD_ENABLED)
    asked.meta["val"] = None
    return asked
