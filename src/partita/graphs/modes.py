"""Modes: the grad, inference and autocast state that each node runs under, found in one forward pass.

A graph switches modes by nodes that act on everything after them. Taken as a property of the nodes in between, a mode
no longer depends on order: a node can move, and whoever writes it down again sets the mode that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node

from partita._torch import toggles
from partita.errors import ModeError
from partita.graphs.index import Index

__all__ = ["AMBIENT", "Autocast", "Mode", "Modes", "has_toggles", "modes_of"]


@dataclass(frozen=True, slots=True)
class Autocast:
    """The arguments of one autocast block; None means: as the surroundings have it."""

    device: str
    dtype: torch.dtype | None = None
    enabled: bool = True
    cache: bool | None = None

    def __str__(self) -> str:
        how = "" if self.dtype is None else f" {str(self.dtype).removeprefix('torch.')}"
        return f"autocast on {self.device}{how}" if self.enabled else f"no autocast on {self.device}"

    def within(self, outer: Autocast | None) -> Autocast:
        """This block inside another one of its device, from which it takes what it leaves open."""
        if outer is None:
            return self
        dtype = outer.dtype if self.dtype is None else self.dtype
        return replace(self, dtype=dtype, cache=outer.cache if self.cache is None else self.cache)


@dataclass(frozen=True, slots=True)
class Mode:
    """What a graph has set so far; None, or no entry for a device, means: as the caller has it."""

    grad: bool | None = None
    inference: bool | None = None
    autocast: tuple[Autocast, ...] = ()

    def __str__(self) -> str:
        words = []
        if self.inference is not None:
            words.append("inference_mode" if self.inference else "no inference_mode")
        if self.grad is not None and self.grad != (None if self.inference is None else not self.inference):
            words.append("enable_grad" if self.grad else "no_grad")
        return ", ".join([*words, *map(str, self.autocast)]) or "the caller's modes"


AMBIENT = Mode()


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


def modes_of(index: Index) -> Modes:
    """The modes of all nodes; costs nothing in a graph that switches none."""
    if not has_toggles(index.graph):
        return Modes()
    state, by_number, found = _State(), [], set()
    for number, node in enumerate(index.nodes):
        if node.op == "call_function" and state.switch(node):
            found.add(number)
        by_number.append(state.mode)
    read = tuple(_read_toggles(index.nodes[number] for number in sorted(found)))
    return Modes(tuple(by_number), frozenset(found), state.mode, read)


def has_toggles(graph: Graph) -> bool:
    """Whether a graph switches any mode."""
    return any(graph.find_nodes(op="call_function", target=target, sort=False) for target in toggles.TOGGLES)


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


@dataclass(slots=True)
class _State:
    """The mode in force, and what each open block will put back when it is left."""

    mode: Mode = AMBIENT
    active: dict[str, Autocast] = field(default_factory=dict)
    left_autocast: dict[Node, Autocast | None] = field(default_factory=dict)
    left_inference: dict[Node, tuple[Mode, tuple[Node, ...]]] = field(default_factory=dict)
    asked_grad: dict[Node, bool | None] = field(default_factory=dict)

    def switch(self, node: Node) -> bool:
        """Takes note of `node`; whether it does nothing but switch modes."""
        action = _ACTIONS.get(node.target)  # type: ignore[arg-type]
        if action is not None:
            action(self, node)
            return True
        if node.target is toggles.IS_GRAD_ENABLED:
            self.asked_grad[node] = self.mode.grad
            return bool(node.users) and all(user.target is toggles.SET_GRAD for user in node.users)
        return False

    def set_grad(self, node: Node) -> None:
        wanted = node.args[0] if len(node.args) == 1 else None
        if isinstance(wanted, Node) and wanted in self.asked_grad:
            self.mode = replace(self.mode, grad=self.asked_grad[wanted])
        elif isinstance(wanted, bool):
            self.mode = replace(self.mode, grad=wanted)
        else:
            raise _not_constant(node)

    def enter_inference(self, node: Node) -> None:
        wanted = node.args[0] if node.args else node.kwargs.get("mode", True)
        if not isinstance(wanted, bool):
            raise _not_constant(node)
        if not node.users:
            return  # The block ends when its handle is dropped, which generated code does at once.
        self.left_inference[node] = (self.mode, tuple(self.left_autocast))
        # Entering sets the grad mode as well, to the opposite; leaving restores both.
        self.mode = replace(self.mode, inference=wanted, grad=not wanted)

    def exit_inference(self, node: Node) -> None:
        before, blocks = self.left_inference.pop(_opener(node, self.left_inference))
        if blocks != tuple(self.left_autocast) or before.autocast != self.mode.autocast:
            # Leaving an inference block puts back the whole dispatch state, autocast included (seen in torch 2.13).
            crossing = sorted(block.name for block in {*blocks} ^ {*self.left_autocast}) or ["autocast"]
            raise ModeError(
                f"{', '.join(map(repr, crossing))} crosses the inference block that {node.name!r} leaves: autocast is "
                "not as it was where the block was entered; close the inner blocks before the outer one"
            )
        self.mode = replace(self.mode, inference=before.inference, grad=before.grad)

    def enter_autocast(self, node: Node) -> None:
        entered = _autocast_arguments(node)
        outer = self.active.get(entered.device)
        self.left_autocast[node] = outer
        self.active[entered.device] = entered.within(outer)
        self.mode = replace(self.mode, autocast=tuple(self.active.values()))

    def exit_autocast(self, node: Node) -> None:
        opener = _opener(node, self.left_autocast)
        device = _autocast_arguments(opener).device
        outer = self.left_autocast.pop(opener)
        if outer is None:
            self.active.pop(device, None)
        else:
            self.active[device] = outer
        self.mode = replace(self.mode, autocast=tuple(self.active.values()))


_ACTIONS = {
    toggles.SET_GRAD: _State.set_grad,
    toggles.ENTER_INFERENCE: _State.enter_inference,
    toggles.EXIT_INFERENCE: _State.exit_inference,
    toggles.ENTER_AUTOCAST: _State.enter_autocast,
    toggles.EXIT_AUTOCAST: _State.exit_autocast,
}


def _autocast_arguments(node: Node) -> Autocast:
    named = dict(zip(("device_type", "dtype", "enabled", "cache_enabled"), node.args, strict=False)) | dict(node.kwargs)
    device, dtype = named.get("device_type"), named.get("dtype")
    enabled, cache = named.get("enabled", True), named.get("cache_enabled")
    if (
        isinstance(device, str)
        and isinstance(dtype, torch.dtype | None)
        and isinstance(enabled, bool)
        and isinstance(cache, bool | None)
    ):
        return Autocast(device, dtype, enabled, cache)
    raise _not_constant(node)


def _opener(node: Node, still_open: Mapping[Node, object]) -> Node:
    opener = node.args[0] if node.args else None
    if isinstance(opener, Node) and opener in still_open:
        return opener
    named = opener.name if isinstance(opener, Node) else opener
    raise ModeError(
        f"node {node.name!r} leaves {named!r}, which is not an open block: it was never entered or is left twice; "
        f"erase {node.name!r}, or enter the block before it"
    )


def _not_constant(node: Node) -> ModeError:
    return ModeError(
        f"node {node.name!r} switches a mode by values that are not constants: {node.format_node()}; "
        "a mode must be known before the program runs: trace the model again with the mode fixed"
    )
