"""Flat, stateless copies of bodies for a compiler, which may change them.

The tensors of modules become inputs, and containers are flattened.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from partita._torch.fx.graph_writer import GraphWriter, map_nodes
from partita.errors import BrokenGraphError
from partita.lowering._torch.containers import Container, Leaf, Shape, assembled


def body_for_compiler(
    body: GraphModule,
    slots: Sequence[HasPlace],
    *,
    inputs: Sequence[Shape],
    outputs: Sequence[tuple[str, tuple[Any, ...]]] | None = None,
    copied_back: Collection[str] = (),
) -> GraphModule:
    """A copy of `body` with one more input for each of `slots`, behind its own.

    `outputs` are the names of nodes and the keys by which leaves are read from their results; without them, the copy
    returns what the body returns. Mutations by the nodes `copied_back` are computed as new tensors and copied into the
    mutated ones. Traced values are excluded: their symbols belong to another trace.
    """
    modules: dict[str, Stateless] = {}
    for target in {str(node.target): None for node in body.graph.find_nodes(op="call_module")}:
        inside = [slot for slot in slots if f"{slot.path}.".startswith(f"{target}.")]
        modules[target] = Stateless(body.get_submodule(target), target, inside)
    graph = _BodyCopy(body.graph, modules, copied_back).graph(slots, inputs, outputs)
    held: dict[str, Any] = dict(modules)
    for node in graph.find_nodes(op="get_attr"):
        held[str(node.target)] = _copied_body(body, node)
    copied = GraphModule(held, graph, class_name="Body")
    copied.training = body.training
    return copied


def _copied_body(body: GraphModule, node: Node) -> nn.Module:
    """A copy of the body of a higher-order operator; raises for one that holds tensors."""
    inner = body.get_submodule(str(node.target))
    if any(isinstance(value, Tensor) for module in inner.modules() for value in _held_by(module)):
        raise BrokenGraphError(f"the body {node.target!r} that node {node.name!r} reads holds tensors; pass them to it")
    return copy.deepcopy(inner)


def _held_by(module: nn.Module) -> list[Any]:
    return [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]


@final
class _BodyCopy:
    """Writes one copy."""

    def __init__(self, source: Graph, modules: Mapping[str, Stateless], copied_back: Collection[str]) -> None:
        self.source, self.modules, self.copied_back = source, modules, copied_back
        self.writer = GraphWriter()  # A tracer of torch.export cannot be made again, and a backend may pickle the body.
        self.env: dict[Node, Any] = {}
        self.states: dict[HasPlace, Node] = {}

    def graph(
        self, slots: Sequence[HasPlace], inputs: Sequence[Shape], outputs: Sequence[tuple[str, tuple[Any, ...]]] | None
    ) -> Graph:
        nodes = list(self.source.nodes)
        self.writer.names.reserve(node.name for node in nodes)
        leaves = [self._copy_input(node, shape) for node, shape in zip(nodes, inputs, strict=False)]
        for slot in slots:
            self.states[slot] = self._write_input(f"{slot.path}_{slot.name}")
        for node, shape, nodes_of_leaves in zip(nodes, inputs, leaves, strict=False):
            self.env[node] = assembled(shape, iter(nodes_of_leaves), self._make)
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
        form = out_of_place(node) if node.name in self.copied_back else None
        if form is not None:
            self._copy_back(node, form)
            return
        copied = self.writer.copy(node, self.env.__getitem__, name=node.name)
        _drop_traced_values(copied)
        if node.op == "call_module":
            state = [self.states[slot] for slot in self.modules[str(node.target)].slots]
            copied.args = (*state, *copied.args)
        self.env[node] = copied

    def _copy_back(self, node: Node, form: OutOfPlace) -> None:
        args, kwargs = map_nodes((node.args, dict(node.kwargs)), self.env.__getitem__)
        name = self.writer.names.fresh(f"new_{node.name}")
        made = self.writer.write(form.op, form.target, tuple(args), kwargs, name=name)
        self.env[node] = self.writer.write("call_method", "copy_", (args[0], made), name=node.name)
        for copied in (made, self.env[node]):
            self.writer.copy_meta(node, copied)
            _drop_traced_values(copied)

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


def _drop_traced_values(node: Node) -> None:
    for key in ("val", "example_value", "tensor_meta", "unbacked_bindings"):
        node.meta.pop(key, None)


class OutOfPlace(NamedTuple):
    """A call that computes as a new tensor what another one mutates its first argument to."""

    op: str
    target: Any


def out_of_place(node: Node) -> OutOfPlace | None:
    """The form of an in-place method or operator of torch that mutates nothing; None for other nodes."""
    if not node.args:
        return None
    if isinstance(node.target, OpOverload) and node.target.namespace == "aten":
        name, _, overload = node.target.__name__.partition(".")
        packet = getattr(torch.ops.aten, name[:-1], None) if _is_in_place(name) else None
        target = getattr(packet, overload, None)
        return None if target is None else OutOfPlace("call_function", target)
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    is_method = node.op == "call_method" or getattr(Tensor, name, None) is node.target
    if not is_method or not _is_in_place(name) or not hasattr(Tensor, name[:-1]):
        return None
    return OutOfPlace("call_method", name[:-1])


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


class HasPlace(Protocol):
    """Where a module in a body holds a tensor."""

    @property
    def path(self) -> str: ...
    @property
    def table(self) -> str: ...
    @property
    def name(self) -> str: ...


@final
class Stateless(nn.Module):
    """A module that gets the tensors of `module` as its first arguments; it is thread-safe."""

    def __init__(self, module: nn.Module, target: str, slots: Sequence[HasPlace]) -> None:
        super().__init__()
        self.slots = tuple(slots)
        self.training = module.training
        self._bare = _Bare(module, [(slot.path[len(target) + 1 :], slot.table, slot.name) for slot in slots])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        count = len(self.slots)
        return self._bare.with_tensors(args[:count])(*args[count:], **kwargs)


@final
class _Bare:
    """A module tree without its tensors; not an `nn.Module`, so that its state is not found as that of a parent."""

    def __init__(self, module: nn.Module, places: Sequence[tuple[str, str, str]]) -> None:
        paths = dict(module.named_modules(remove_duplicate=False))
        number = {id(found): at for at, found in enumerate(dict.fromkeys(paths.values()))}
        self._modules = [_without_tensors(found) for found in dict.fromkeys(paths.values())]
        self._children = [
            [(name, number[id(child)]) for name, child in found._modules.items() if child is not None]
            for found in dict.fromkeys(paths.values())
        ]
        self._places = [(number[id(paths[path])], table, name) for path, table, name in places]

    def with_tensors(self, tensors: Sequence[Any]) -> nn.Module:
        """New modules that hold these tensors; earlier ones are unchanged."""
        copies = [_shallow(module) for module in self._modules]
        for module, children in zip(copies, self._children, strict=True):
            module._modules.update({name: copies[at] for name, at in children})
        for (at, table, name), tensor in zip(self._places, tensors, strict=True):
            found = vars(copies[at])
            (found if table == "__dict__" else found[table])[name] = tensor
        for module in copies:
            if isinstance(module, nn.RNNBase):
                _list_weights(module)
        return copies[0]


def _list_weights(module: nn.RNNBase) -> None:
    """Sets the weight list of a recurrent module, as the module does itself, with weak references to detect changes."""
    weights = [weight for layer in module.all_weights for weight in layer]
    references = [None if weight is None else ref(weight) for weight in weights]
    module.__dict__.update(_flat_weights=weights, _flat_weight_refs=references)


def _without_tensors(module: nn.Module) -> nn.Module:
    """A copy that keeps nothing of its model alive: no tensors, no submodules, no hooks."""
    bare = _shallow(module)
    bare._modules.update(dict.fromkeys(bare._modules))
    vars(bare).update({name: table for name, table in vars(nn.Module()).items() if name.endswith("_hooks")})
    for table in (bare._parameters, bare._buffers, vars(bare)):
        table.update({name: None for name, value in table.items() if isinstance(value, Tensor)})
    if isinstance(bare, nn.RNNBase):
        bare.__dict__.update(_flat_weights=[], _flat_weight_refs=[])
    return bare


def _shallow(module: nn.Module) -> nn.Module:
    copied = object.__new__(type(module))
    copied.__dict__.update(vars(module))
    copied.__dict__.update({table: dict(vars(module)[table]) for table in ("_parameters", "_buffers", "_modules")})
    return copied
