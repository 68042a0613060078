"""The flat graph of a program while it is written: bodies are copied where they are called, at any depth."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.nodes import GraphWriter, map_nodes
from partita._torch.operators import SYM_SIZE
from partita.graphs.attributes import attribute_of, find
from partita.graphs.mode import AMBIENT, Block, Grad, Mode, Setting
from partita.graphs.program import Program
from partita.rewrite.assembly import module_like
from partita.rewrite.call_binding import bound_arguments, returned_value
from partita.rewrite.mode_writer import ModeWriter
from partita.rewrite.state import is_persistent, place, share_state

__all__ = ["BodyCall", "Inlining"]


@dataclass(frozen=True, slots=True)
class BodyCall:
    """A call of a body: its path in the program, what it is given, and the setting that it runs under, if any."""

    path: str
    body: GraphModule
    operands: tuple[Any, ...]
    keywords: Mapping[str, Any]
    sets: Setting | None
    #: The node that reads the body for an operator.
    read: Node | None = None


@dataclass(slots=True)
class _Scope:
    """A graph that is being copied: new values for its nodes, and where and in which mode it is called."""

    program: Program
    calls: Mapping[Node, BodyCall]
    env: dict[Node, Any]
    path: str = ""
    around: Mode = AMBIENT
    #: The calls that led here, the outermost first: a body may be called several times.
    calls_around: tuple[Node, ...] = ()
    _modes: dict[int, Mode] = field(default_factory=dict)

    def mode_at(self, number: int) -> Mode:
        """The mode of a node, whatever the graph is called under included."""
        mode = self.program.modes.at(number)
        if not self.calls_around:
            return mode
        if id(mode) not in self._modes:
            self._modes[id(mode)] = mode.within(self.around, call=self.calls_around)
        return self._modes[id(mode)]


class Inlining:
    """Inlines `calls`, and in the bodies those that `calls_in` finds."""

    def __init__(
        self,
        program: Program,
        calls: Mapping[Node, BodyCall],
        calls_in: Callable[[Program], Mapping[Node, BodyCall]],
    ) -> None:
        self.program, self.calls, self.calls_in = program, calls, calls_in
        self.root = program.graph_module
        self.writer = GraphWriter(program.graph._tracer_cls)
        self.modes = ModeWriter(self.writer, caller=self.program.caller)
        self.placed: dict[str, Any] = {}
        self.fleeting: set[str] = set()

    def inlined(self) -> Program:
        scope = _Scope(self.program, self.calls, dict.fromkeys(self.program.modes.read))
        nodes = self.program.index.nodes
        self.writer.names.reserve(node.name for node in nodes if not _vanishes(node, self.calls))
        self._write(scope)
        output = nodes[-1]
        self.modes.switch(self.program.modes.final)
        self.writer.copy(output, scope.env.__getitem__, name=output.name)
        return self._assembled()

    def _write(self, scope: _Scope) -> None:
        """Everything but the output."""
        toggles, calls, env = scope.program.modes.toggles, scope.calls, scope.env
        for number, node in enumerate(scope.program.index.nodes):
            if number in toggles or node in env or node.op == "output" or _is_body_only(node, calls):
                continue
            if node in calls:
                env[node] = self._write_body(node, calls[node], scope, number)
            elif _takes_item(node, env):
                env[node] = env[node.args[0]][node.args[1]]  # type: ignore[index]
            else:
                if node.op not in ("get_attr", "placeholder"):  # Both mean the same in every mode.
                    self.modes.switch(scope.mode_at(number))
                env[node] = self._copy(node, scope)

    def _copy(self, node: Node, scope: _Scope) -> Node:
        if not scope.calls_around:
            return self.writer.copy(node, scope.env.__getitem__, name=node.name)
        target = self._place(node, scope) if node.op in ("call_module", "get_attr") else None
        return self.writer.copy(node, scope.env.__getitem__, name=self.writer.names.fresh(node.name), target=target)

    def _write_body(self, node: Node, call: BodyCall, scope: _Scope, number: int) -> Any:
        """Writes the nodes of the body that `node` calls; what it gives."""
        inner = scope.program.body(call.body)
        given = bound_arguments(node, call.body.graph, call.operands, call.keywords)
        env = {placeholder: map_nodes(value, scope.env.__getitem__) for placeholder, value in given.items()}
        env.update(dict.fromkeys(inner.modes.read))
        output = inner.index.nodes[-1]
        calls = (*scope.calls_around, node)
        body = _Scope(
            inner,
            self.calls_in(inner),
            env,
            path=f"{scope.path}{call.path}.",
            around=_mode_inside(scope.mode_at(number), calls, call.sets),
            calls_around=calls,
        )
        self._write(body)
        return map_nodes(returned_value(node, output), env.__getitem__)

    def _place(self, node: Node, scope: _Scope) -> str:
        """A path for what the body names: where it was before it moved, or else where it is now."""
        body = scope.program.graph_module
        value = attribute_of(body, node)
        now = f"{scope.path}{node.target}"
        before = self.program.state_keys.original(now)
        known = self.placed.get(before, find(self.root, before))
        path = before if known is None or known is value or _is_rest_of(known, value) else now
        if path == now and node.op == "get_attr" and isinstance(value, GraphModule):
            path = self._place_at_the_top(str(node.target), value)
        self.placed[path] = value
        if not is_persistent(body, str(node.target)):
            self.fleeting.add(path)
        return path

    def _place_at_the_top(self, name: str, body: GraphModule) -> str:
        """A path for the body of an operator: torch.export cannot save one that lies deeper."""
        base = path = name.replace(".", "_")
        count = 0
        while self.placed.get(path, getattr(self.root, path, body)) is not body:
            count += 1
            path = f"{base}_{count}"
        return path

    def _assembled(self) -> Program:
        graph = self.writer.close()
        self.modes.close()
        had_users = {node.name for node in self.program.index.nodes if node.users}
        for node in reversed(graph.nodes):
            if node.target in (SYM_SIZE, operator.getitem) and not node.users and node.name in had_users:
                graph.erase_node(node)
        module = module_like(self.root, graph, restores_modes=self.modes.has_switched)
        gone = {call.path for call in self.calls.values()}
        kept = _folders_of_targets(graph)
        share_state(self.root, module, without=frozenset(gone) - kept, room_for=self.placed)
        for path, value in self.placed.items():
            if find(module, path) is not value:
                place(module, path, value, persistent=path not in self.fleeting)
        paths = (path for path, _ in module.named_modules(remove_duplicate=False) if path not in self.placed)
        return self.program.rewritten(module, state_keys=self.program.state_keys.of_paths(paths))


def _vanishes(node: Node, calls: Mapping[Node, BodyCall]) -> bool:
    source = node.args[0] if node.target is operator.getitem and node.args else None
    return node in calls or (isinstance(source, Node) and source in calls) or _is_body_only(node, calls)


def _is_body_only(node: Node, calls: Mapping[Node, BodyCall]) -> bool:
    """Whether `node` reads a body for nothing but calls that are inlined."""
    users = [calls.get(user) for user in node.users] if node.op == "get_attr" else []
    return bool(users) and all(call is not None and call.read is node for call in users)


def _takes_item(node: Node, env: Mapping[Node, Any]) -> bool:
    """Whether `node` unpacks what an inlined body gave as a tuple."""
    if node.target is not operator.getitem or len(node.args) != 2:
        return False
    source, item = node.args
    return isinstance(source, Node) and isinstance(item, int) and isinstance(env.get(source), tuple | list)


def _mode_inside(mode: Mode, calls: tuple[Node, ...], sets: Setting | None) -> Mode:
    """The mode of a body that the last of `calls` runs under a setting."""
    if sets is None:
        return mode
    return replace(mode, grad=sets.enabled) if isinstance(sets, Grad) else mode.inside(Block(calls, sets, mode.grad))


def _is_rest_of(container: Any, module: object) -> bool:
    """Whether a plain container holds nothing but tensors of the module that has moved from its place."""
    if type(container) is not nn.Module or not isinstance(module, nn.Module) or container._modules:
        return False
    left = {**container._parameters, **container._buffers}
    return all(getattr(module, name, None) is tensor for name, tensor in left.items())


def _folders_of_targets(graph: Graph) -> set[str]:
    """The paths that a graph names, and every path above one of them."""
    paths = (str(node.target).split(".") for node in graph.nodes if node.op in ("call_module", "get_attr"))
    return {".".join(parts[:depth]) for parts in paths for depth in range(1, len(parts) + 1)}
