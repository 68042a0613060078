"""Inlining: a call of a body becomes the nodes of the body; the inverse of outlining."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from partita._torch.nodes import GraphWriter, map_nodes
from partita._torch.operators import SYM_SIZE
from partita._torch.pause_gc import gc_paused
from partita.errors import ModeError, OptionError
from partita.graphs.attributes import attribute_of, find
from partita.graphs.faithful import runs_its_graph
from partita.graphs.modes import AMBIENT, Mode
from partita.graphs.program import Program
from partita.rewrite.assembly import module_like
from partita.rewrite.mode_writer import ModeWriter
from partita.rewrite.state import is_persistent, place, share_state

__all__ = ["inline"]


def inline(program: Program, calls: Collection[str] | str | None = None) -> Program:
    """A new program with the bodies of these calls, by node name, in their place; of all graph modules if None.

    A body is copied, never taken: whoever else calls it still can. A module with hooks, or with nested containers as
    arguments, stays a call.
    """
    with gc_paused():
        return _Inliner(program, _chosen(program, [calls] if isinstance(calls, str) else calls)).inlined()


def _chosen(program: Program, calls: Collection[str] | None) -> dict[Node, GraphModule]:
    found = {}
    wanted = None if calls is None else frozenset(calls)
    for node in program.index.nodes:
        if node.op == "call_module" and (wanted is None or node.name in wanted):
            body = attribute_of(program.graph_module, node)
            why = _obstacle(body)
            if why is None:
                found[node] = body
            elif calls is not None:
                raise OptionError(f"node {node.name!r} calls {node.target!r}, which cannot be inlined: {why}")
    missing = (wanted or frozenset()) - {node.name for node in found}
    if missing:
        raise OptionError(f"no call of a module is named {', '.join(sorted(map(repr, missing)))}")
    return found


class _Inliner:
    """The flat graph while it is written."""

    def __init__(self, program: Program, chosen: Mapping[Node, GraphModule]) -> None:
        self.program, self.chosen = program, chosen
        self.root = program.graph_module
        self.writer = GraphWriter(program.graph._tracer_cls)
        self.modes = ModeWriter(self.writer)
        self.env: dict[Node, Any] = dict.fromkeys(program.modes.read)
        self.placed: dict[str, Any] = {}
        self.fleeting: set[str] = set()

    def inlined(self) -> Program:
        nodes, modes = self.program.index.nodes, self.program.modes
        self.writer.names.reserve(node.name for node in nodes if not self._vanishes(node))
        for number, node in enumerate(nodes):
            if number in modes.toggles:
                continue
            if node in self.chosen:
                self._write_body(node, self.chosen[node], modes.at(number))
            elif self._takes_item(node):
                self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
            else:
                if node.op != "get_attr":  # Reading an attribute means the same in every mode.
                    self.modes.switch(modes.final if node.op == "output" else modes.at(number))
                self.env[node] = self.writer.copy(node, self.env.__getitem__, name=node.name)
        return self._assembled()

    def _takes_item(self, node: Node) -> bool:
        """Whether `node` unpacks what an inlined body gave as a tuple."""
        if node.target is not operator.getitem or len(node.args) != 2:
            return False
        source, item = node.args
        return isinstance(source, Node) and isinstance(item, int) and isinstance(self.env.get(source), tuple | list)

    def _vanishes(self, node: Node) -> bool:
        source = node.args[0] if node.target is operator.getitem and node.args else None
        return node in self.chosen or (isinstance(source, Node) and source in self.chosen)

    def _write_body(self, call: Node, body: GraphModule, outer: Mode) -> None:
        inner = Program.of(body)
        if inner.modes.final != AMBIENT:
            raise ModeError(
                f"the body that {call.name!r} calls leaves {inner.modes.final} behind, so it cannot be inlined; "
                "close its blocks first"
            )
        env = _bound(call, body, lambda argument: map_nodes(argument, self.env.__getitem__))
        env.update(dict.fromkeys(inner.modes.read))
        for number, node in enumerate(inner.index.nodes):
            if node.op == "placeholder" or number in inner.modes.toggles:
                continue
            if node.op == "output":
                self.env[call] = map_nodes(node.args[0], env.__getitem__)
                return
            if node.op != "get_attr":
                self.modes.switch(_inside(outer, inner.modes.at(number)))
            target = self._place(call, node, body) if node.op in ("call_module", "get_attr") else None
            env[node] = self.writer.copy(node, env.__getitem__, name=self.writer.names.fresh(node.name), target=target)

    def _place(self, call: Node, node: Node, body: GraphModule) -> str:
        """A path for what the body names: where it was before it moved, or else where it is now."""
        value = attribute_of(body, node)
        now = f"{call.target}.{node.target}"
        before = self.program.state_keys.original(now)
        known = self.placed.get(before, find(self.root, before))
        path = before if known is None or known is value or _is_rest_of(known, value) else now
        self.placed[path] = value
        if not is_persistent(body, str(node.target)):
            self.fleeting.add(path)
        return path

    def _assembled(self) -> Program:
        graph = self.writer.close()
        self.modes.close()
        had_users = {node.name for node in self.program.index.nodes if node.users}
        for node in reversed(graph.nodes):
            if node.target in (SYM_SIZE, operator.getitem) and not node.users and node.name in had_users:
                graph.erase_node(node)
        module = module_like(self.root, graph, restores_modes=self.modes.has_switched)
        gone = {str(node.target) for node in self.chosen}
        kept = _folders_of_targets(graph)
        share_state(self.root, module, without=frozenset(gone) - kept, room_for=self.placed)
        for path, value in self.placed.items():
            if find(module, path) is not value:
                place(module, path, value, persistent=path not in self.fleeting)
        return Program(
            module,
            pure=self.program.pure,
            state_keys=self.program.state_keys.of_paths(
                path for path, _ in module.named_modules() if path not in self.placed
            ),
            tolerance=self.program.tolerance,
        )


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


def _bound(call: Node, body: GraphModule, translated: Callable[[Any], Any]) -> dict[Node, Any]:
    """What each input of the body stands for: by position, by keyword, or its default."""
    env: dict[Node, Any] = {}
    positional, named = deque(call.args), dict(call.kwargs)
    for placeholder in (node for node in body.graph.nodes if node.op == "placeholder"):
        target = str(placeholder.target)
        if target.startswith("**"):
            env[placeholder] = translated(named)
            named = {}
        elif target.startswith("*"):
            env[placeholder] = translated(tuple(positional))
            positional.clear()
        elif positional:
            env[placeholder] = translated(positional.popleft())
        elif target in named:
            env[placeholder] = translated(named.pop(target))
        elif placeholder.args:
            env[placeholder] = placeholder.args[0]
        else:
            raise OptionError(f"the call {call.name!r} gives no value for {target!r}; pass one, or give it a default")
    if positional or named:
        raise OptionError(
            f"the call {call.name!r} gives more arguments than its body takes: {list(positional) or named}"
        )
    return env


def _inside(outer: Mode, inner: Mode) -> Mode:
    """The mode of a node that sets `inner` in a body that is called under `outer`."""
    around = {autocast.device: autocast for autocast in outer.autocast}
    own = [entered.within(around.pop(entered.device, None)) for entered in inner.autocast]
    return Mode(
        outer.grad if inner.grad is None else inner.grad,
        outer.inference if inner.inference is None else inner.inference,
        (*around.values(), *own),
    )


def _obstacle(body: object) -> str | None:
    """Why a body cannot be inlined, or None."""
    if not isinstance(body, GraphModule):
        return "it is no graph module"
    if not runs_its_graph(body):
        return "it has hooks, or a `forward` of its own, which would be lost"
    if type(body.graph._codegen) is not CodeGen:
        return "its inputs and outputs are trees that its own code takes apart"
    return None
