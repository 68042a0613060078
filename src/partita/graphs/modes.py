"""Modes: the grad, inference and autocast state that each node runs under, found in one forward pass.

A graph switches modes by nodes that act on everything after them. Taken as a property of the nodes in between, a mode
no longer depends on order: a node can move, and whoever writes it down again sets the mode that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, Node

from partita._torch import toggles
from partita.errors import ModeError
from partita.graphs.index import Index
from partita.graphs.mode import AMBIENT, EVERY_SETTING, Autocast, Grad, Inference, Mode
from partita.graphs.mode_switches import ModeSwitches

__all__ = ["AMBIENT", "Autocast", "Mode", "Modes", "has_toggles", "modes_of"]


@dataclass(frozen=True, slots=True)
class Modes:
    """The mode of every node; `toggles` are the nodes that only switch modes, `final` is what they leave behind."""

    by_number: tuple[Mode, ...] | None = None
    toggles: frozenset[int] = frozenset()
    final: Mode = AMBIENT

    #: Toggles whose result somebody reads: it is always None.
    read: tuple[Node, ...] = ()

    def with_projections(self, sources: Mapping[int, int]) -> Modes:
        """Modes in which taking an item has the mode of what made the container: it runs beside that."""
        if self.by_number is None or not sources:
            return self
        by_number = list(self.by_number)
        for number, source in sources.items():
            by_number[number] = by_number[source]
        return replace(self, by_number=tuple(by_number))

    def at(self, number: int) -> Mode:
        return AMBIENT if self.by_number is None else self.by_number[number]


def modes_of(index: Index, caller: Mode = AMBIENT) -> Modes:
    """The modes of all nodes, as far as they differ from `caller`; costs nothing in a graph that switches none."""
    if not has_toggles(index.graph):
        return Modes()
    switches, by_number, found = ModeSwitches(caller), [], set()
    for number, node in enumerate(index.nodes):
        if node.op == "call_function" and switches.take(node):
            found.add(number)
        by_number.append(switches.shown)
    read = tuple(_read_toggles(index.nodes[number] for number in sorted(found)))
    return Modes(tuple(by_number), frozenset(found), switches.shown, read)


def has_toggles(graph: Graph, kinds: Collection[type] = EVERY_SETTING) -> bool:
    """Whether a graph switches any mode by toggles of these kinds."""
    targets = (target for kind in kinds for target in _TOGGLES_OF[kind])
    return any(graph.find_nodes(op="call_function", target=target, sort=False) for target in targets)


_TOGGLES_OF: dict[type, tuple[Callable[..., Any], ...]] = {
    Grad: (toggles.SET_GRAD,),
    Inference: (toggles.ENTER_INFERENCE, toggles.EXIT_INFERENCE),
    Autocast: (toggles.ENTER_AUTOCAST, toggles.EXIT_AUTOCAST),
}


def _read_toggles(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        readers = [user for user in node.users if user.target not in toggles.TOGGLES]
        if readers and node.target in (toggles.ENTER_AUTOCAST, toggles.ENTER_INFERENCE):
            raise ModeError(
                f"node {readers[0].name!r} reads {node.name!r}, the handle of a block; only the node that leaves the "
                "block may read it: take it out of the arguments"
            )
        if readers and node.target is not toggles.IS_GRAD_ENABLED:
            yield node
