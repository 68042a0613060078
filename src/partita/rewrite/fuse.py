"""Fusing in place: groups of nodes become submodules of the module that holds them, as torch's fuser does it.

Everything is decided and written down before the module is touched, and it gets its new graph in one step.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch.fx import Graph, GraphModule, Node

from partita._torch.names import Names
from partita._torch.nodes import GraphWriter
from partita.graphs.mode import AMBIENT, Mode
from partita.graphs.program import Program
from partita.rewrite.fused_bodies import (
    FusedBody,
    FusedStyle,
    fused_body,
    is_idle,
    mode_of_call,
    names_module,
    values_of_call,
)
from partita.rewrite.mode_writer import ModeWriter
from partita.rewrite.state import place
from partita.solvers.fused_order import OUTSIDE, fused_order

__all__ = ["fuse"]


def fuse(
    program: Program, groups: Sequence[Sequence[int]], names: Sequence[str], *, returns_tuple: bool = False
) -> None:
    """Makes each group of nodes, given by number in an order in which they can run, a submodule of this name.

    The groups are disjoint, each does something, and they can run one after another.
    """
    calls = _calls(program, groups, names, returns_tuple=returns_tuple)
    outer = _OuterGraph(program, calls)
    graph = outer.write()
    _tell_hooks(program, outer)
    _commit(program.graph_module, graph, calls)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a body, in this mode, in the place of the last of these nodes; what it and its items are called."""

    name: str
    body: FusedBody
    mode: Mode
    numbers: Sequence[int]
    node_name: str
    item_names: Sequence[str]


def _calls(
    program: Program, groups: Sequence[Sequence[int]], names: Sequence[str], *, returns_tuple: bool
) -> list[_Call]:
    """The calls, written one after another: an input that an earlier one gives is called as that calls it."""
    calls = []
    node_names, given = Names.continuing(program.graph), dict[Node, str]()
    for numbers, name in zip(groups, names, strict=True):
        mode = mode_of_call(program, numbers) or AMBIENT
        style = FusedStyle(name, mode, returns_tuple=returns_tuple, is_part=True)
        body = fused_body(program, numbers, style, given)
        node_name = node_names.fresh_for(name)
        items = () if body.is_bare else [node_names.fresh_for(operator.getitem) for _ in body.outputs]
        given.update(zip(body.outputs, [node_name] if body.is_bare else items, strict=True))
        calls.append(_Call(name, body, mode, numbers, node_name, items))
    return calls


@final
class _OuterGraph:
    """The graph with the calls while it is written: `env` gives the new node for each old one."""

    def __init__(self, program: Program, calls: Sequence[_Call]) -> None:
        self.program, self.calls = program, calls
        self.nodes = program.index.nodes
        # Modes are set anew, and a body of an operator is read wherever that runs: neither belongs to a group.
        held = [[at for at in call.numbers if not is_idle(program, at)] for call in calls]
        self.owner = [OUTSIDE] * len(self.nodes)
        for group, numbers in enumerate(held):
            for number in numbers:
                self.owner[number] = group
        self.lasts = [numbers[-1] for numbers in held]
        self.writer = GraphWriter(program.graph._tracer_cls)
        self.modes = ModeWriter(self.writer, caller=program.caller)
        self.env: dict[Node, Any] = dict.fromkeys(program.modes.read)
        #: The nodes that stand for calls, by group.
        self.called: dict[int, Node] = {}
        #: The place of each node among those that its body gives.
        self.place = {node: at for call in calls for at, node in enumerate(call.body.outputs)}

    def write(self) -> Graph:
        items = self._items()
        source = {item: number for number, item in items.items()}
        for step in self._order(items):
            if step in source:
                self._write_item(source[step])
            elif self.owner[step] == OUTSIDE:
                self._write_node(self.nodes[step], step)
            else:
                self._write_call(self.owner[step])
        self.modes.switch(self.program.modes.final)
        graph = self.writer.close()
        self.modes.close()
        # The code generator carries the calling convention.
        graph.set_codegen(copy.copy(self.program.graph._codegen))
        return graph

    def _items(self) -> dict[int, int]:
        """A step of its own for every node that a body gives as one of several; they are counted after the nodes."""
        given = (node for call in self.calls if not call.body.is_bare for node in call.body.outputs)
        return {self.program.index.number[node]: len(self.nodes) + at for at, node in enumerate(given)}

    def _order(self, items: Mapping[int, int]) -> list[int]:
        program = self.program
        dropped = {number for number in range(len(self.nodes)) if self._is_dropped(number)}
        data, effects = program.index.edges(), program.effects.edges()
        return fused_order(self.owner, self.lasts, items, data=data, effects=effects, dropped=dropped)

    def _is_dropped(self, number: int) -> bool:
        """Whether a node is a toggle, which is written anew, or a read of a body whose operators have all moved."""
        node, program = self.nodes[number], self.program
        if number in program.modes.toggles:
            return True
        if not node.users or not names_module(node, program.graph_module):
            return False
        return all(self.owner[program.index.number[user]] != OUTSIDE for user in node.users)

    def _write_node(self, node: Node, number: int) -> None:
        if node.op == "output":
            self.modes.switch(self.program.modes.final)
        elif node.op not in ("placeholder", "get_attr") and number not in self.program.symbolic_scalars:
            self.modes.switch(self.program.modes.at(number))
        self.env[node] = self.writer.copy(node, self.env.__getitem__, name=self.writer.names.fresh(node.name))

    def _write_call(self, group: int) -> None:
        call = self.calls[group]
        self.modes.switch(call.mode)
        inputs = tuple(self.env[node] for node in call.body.inputs)
        node = self.writer.write("call_module", call.name, inputs, name=self.writer.names.fresh(call.node_name))
        self.called[group] = node
        if call.body.is_bare:
            (given,) = call.body.outputs
            self.writer.copy_meta(given, node)
            self.env[given] = node
        else:
            node.meta.update(values_of_call(call.body.outputs))

    def _write_item(self, number: int) -> None:
        given, group = self.nodes[number], self.owner[number]
        arguments = (self.called[group], self.place[given])
        name = self.writer.names.fresh(self.calls[group].item_names[self.place[given]])
        node = self.writer.write("call_function", operator.getitem, arguments, name=name)
        self.writer.copy_meta(given, node)
        self.env[given] = node


def _tell_hooks(program: Program, outer: _OuterGraph) -> None:
    """Tells whoever watches the module of every node that comes, is replaced and goes: signatures follow by this."""
    root, number, owner = program.graph_module, program.index.number, outer.owner
    for group, call in enumerate(outer.calls):
        given = call.body.outputs
        for created in root._create_node_hooks:
            for node in (outer.called[group], *(outer.env[old] for old in given if not call.body.is_bare)):
                created(node)
        for replaced in root._replace_hooks:
            for old in given:
                for user in old.users:
                    if owner[number[user]] != group:
                        replaced(old=old, new=outer.env[old].name, user=user)  # type: ignore[call-arg]
        for erased in root._erase_node_hooks:
            for at in reversed(call.numbers):
                erased(program.index.nodes[at])


def _commit(root: GraphModule, graph: Graph, calls: Sequence[_Call]) -> None:
    """Gives `root` the new graph and the bodies that it calls; nothing if no code can be generated for it."""
    before, children = root.graph, dict(root._modules)
    try:
        for call in calls:
            place(root, call.name, call.body.module)
        root.graph = graph
    except BaseException:
        for call in calls:
            folder, _, name = call.name.rpartition(".")
            root.get_submodule(folder)._modules.pop(name, None)
        root._modules.clear()
        root._modules.update(children)
        root.graph = before
        raise
