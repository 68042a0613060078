"""Bodies for a compiler: copies that it may change, with nothing but tensors and numbers as inputs and outputs.

Modules in them take their tensors as inputs, and containers are taken apart.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.lowering_containers import Container, Leaf, Shape, assembled
from partita._torch.lowering_stateless import HasPlace, Stateless
from partita._torch.nodes import GraphWriter, map_nodes
from partita.errors import BrokenGraphError

__all__ = ["body_for_compiler"]


def body_for_compiler(
    body: GraphModule,
    slots: Sequence[HasPlace],
    *,
    inputs: Sequence[Shape],
    outputs: Sequence[tuple[str, tuple[Any, ...]]] | None = None,
) -> GraphModule:
    """A copy of `body` with one more input for each of `slots`, behind its own.

    `outputs` are the names of nodes and the keys by which something is read from what they give; without them, the copy
    gives what the body gives. Traced values are left out: their symbols belong to another trace.
    """
    modules = {
        target: Stateless(body.get_submodule(target), target, [slot for slot in slots if _is_in(slot.path, target)])
        for target in {str(node.target): None for node in body.graph.find_nodes(op="call_module")}
    }
    graph = _Copying(body.graph, modules).graph(slots, inputs, outputs)
    held: dict[str, Any] = dict(modules)
    for node in graph.find_nodes(op="get_attr"):
        held[str(node.target)] = _copied_body(body, node)
    return GraphModule(held, graph, class_name="Body")


def _is_in(path: str, target: str) -> bool:
    return path == target or path.startswith(f"{target}.")


def _copied_body(body: GraphModule, node: Node) -> nn.Module:
    """The body that an operator is given; one with tensors of its own cannot take them as inputs."""
    inner = body.get_submodule(str(node.target))
    if any(isinstance(value, Tensor) for module in inner.modules() for value in _held_by(module)):
        raise BrokenGraphError(f"the body {node.target!r} that node {node.name!r} reads holds tensors; pass them to it")
    return copy.deepcopy(inner)


def _held_by(module: nn.Module) -> list[Any]:
    return [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]


@final
class _Copying:
    """One copy while it is written."""

    def __init__(self, source: Graph, modules: Mapping[str, Stateless]) -> None:
        self.source, self.modules = source, modules
        self.writer = GraphWriter(source._tracer_cls)
        self.env: dict[Node, Any] = {}
        self.states: dict[HasPlace, Node] = {}

    def graph(
        self,
        slots: Sequence[HasPlace],
        inputs: Sequence[Shape],
        outputs: Sequence[tuple[str, tuple[Any, ...]]] | None,
    ) -> Graph:
        nodes = list(self.source.nodes)
        self.writer.names.reserve(node.name for node in nodes)
        leaves = [self._copy_input(node, shape) for node, shape in zip(nodes, inputs, strict=False)]
        for slot in slots:
            self.states[slot] = self._write_input(f"{slot.path}_{slot.name}")
        for node, shape, given in zip(nodes, inputs, leaves, strict=False):
            self.env[node] = assembled(shape, iter(given), self._make)
        for node in nodes[len(inputs) : -1]:
            self._copy(node)
        self._write_output(nodes[-1], outputs)
        return self.writer.close()

    def _copy_input(self, node: Node, shape: Shape) -> list[Node]:
        """The inputs that stand for one input of the source."""
        if isinstance(shape, Leaf):
            self._copy(node)
            return [self.env[node]]
        assert isinstance(shape, Container)
        return [made for item in shape.items for made in self._inputs_for(node.name, item)]

    def _inputs_for(self, name: str, shape: Shape) -> list[Node]:
        if isinstance(shape, Container):
            return [made for item in shape.items for made in self._inputs_for(name, item)]
        return [self._write_input(name)]

    def _write_input(self, name: str) -> Node:
        name = self.writer.names.fresh(name.replace(".", "_"))
        return self.writer.write("placeholder", name, name=name)

    def _make(self, kind: type, *items: Any) -> Node:
        if kind is dict:
            # Inductor (torch 2.13) looks up how TorchScript would call `dict`, and fails.
            return self.writer.write("call_method", "copy", items, name=self.writer.names.fresh("container"))
        return self._call(kind, items, "container")

    def _call(self, target: Any, arguments: tuple[Any, ...], name: str) -> Node:
        return self.writer.write("call_function", target, arguments, name=self.writer.names.fresh(name))

    def _copy(self, node: Node) -> None:
        copied = self.writer.copy(node, self.env.__getitem__, name=node.name)
        for key in _TRACED:
            copied.meta.pop(key, None)
        if node.op == "call_module":
            given = [self.states[slot] for slot in self.modules[str(node.target)].slots]
            copied.args = (*given, *copied.args)
        self.env[node] = copied

    def _write_output(self, node: Node, outputs: Sequence[tuple[str, tuple[Any, ...]]] | None) -> None:
        if outputs is None:
            written = map_nodes(node.args[0], self.env.__getitem__)
        else:
            known = {made.name: made for made in self.writer.graph.nodes}
            written = tuple(self._read(known[name], keys) for name, keys in outputs)
        self.writer.write("output", "output", (written,), name=node.name)

    def _read(self, value: Node, keys: tuple[Any, ...]) -> Node:
        for key in keys:
            value = self._call(operator.getitem, (value, key), "item")
        return value


_TRACED = ("val", "example_value", "tensor_meta", "unbacked_bindings")
