"""Writing fx nodes: the same nodes that `Graph.create_node` makes, several times sooner."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.immutable_collections import immutable_dict
from torch.fx.node import map_arg

from partita._torch.names import Names

# A torch without these gets the public way, which is slower.
_NodeBase: Any = getattr(torch._C, "_NodeBase", None)
_fx_map_arg: Callable[[Any, Callable[[Node], Any]], Any] | None = getattr(torch._C, "_fx_map_arg", None)

__all__ = ["GraphWriter", "copy_meta", "input_nodes", "map_nodes"]

#: The nodes that a node reads, each once, as the keys of a dict, in the order in which it mentions them.
input_nodes: Callable[[Node], Mapping[Node, None]] = operator.attrgetter("_input_nodes")

#: `map_nodes(argument, swap)`: `argument` with `swap(node)` in place of every node inside it.
map_nodes: Callable[[Any, Callable[[Node], Any]], Any] = _fx_map_arg or map_arg


class GraphWriter:
    """Appends nodes to one new graph; call `close` once before the graph is used.

    `Graph.create_node` walks all arguments as a pytree, makes up a name, and keeps three tables up to date entry by
    entry. A writer takes names that are known to be free and fills the tables in bulk.
    """

    def __init__(self, tracer_cls: type[Any] | None = None) -> None:
        self.graph = Graph(tracer_cls=tracer_cls)
        self.names = Names(self.graph)
        self._written: list[Node] = []
        self._metas: dict[int, Any] = {}

    def write(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str,
        type_expr: Any = None,
    ) -> Node:
        """The new node; `name` must come from `names` or be reserved there."""
        if not _FAST:
            return self._create(op, target, args, kwargs, name=name, type_expr=type_expr)
        graph = self.graph
        node = Node.__new__(Node)
        _NodeBase.__init__(node, graph, name, op, target, type_expr)
        node._update_args_kwargs(args, dict(kwargs) if kwargs else _NO_KWARGS)
        graph._root._prepend(node)
        graph._find_nodes_lookup_table.table[(op, target if op == "call_function" else None)][node] = None
        self._written.append(node)
        return node

    def copy(self, node: Node, swap: Callable[[Node], Any], *, name: str, target: Any = None) -> Node:
        """A copy of `node` that reads `swap(n)` wherever `node` reads `n`."""
        kwargs = node._kwargs
        copied = self.write(
            node.op,
            node.target if target is None else target,
            map_nodes(node._args, swap),
            map_nodes(kwargs, swap) if kwargs else None,
            name=name,
            type_expr=node.type,
        )
        self.copy_meta(node, copied)
        return copied

    def copy_run(self, nodes: Iterable[Node], env: dict[Node, Any], names: Iterable[str]) -> None:
        """Copies of `nodes`, in order, entered into `env`: one tight loop, since whole graphs are copied here."""
        if not _FAST:
            for node, name in zip(nodes, names, strict=True):
                env[node] = self.copy(node, env.__getitem__, name=name)
            return
        graph, written, metas = self.graph, self._written, self._metas
        make, begin, lookup = Node.__new__, _NodeBase.__init__, env.__getitem__
        put = graph._root._prepend
        table = graph._find_nodes_lookup_table.table
        for node, name in zip(nodes, names, strict=True):
            op, target, kwargs = node.op, node.target, node._kwargs
            copied = make(Node)
            begin(copied, graph, name, op, target, node.type)
            copied._update_args_kwargs(map_nodes(node._args, lookup), map_nodes(kwargs, lookup) if kwargs else kwargs)
            if node.meta:
                copy_meta(node.meta, copied.meta, metas)
            put(copied)
            table[(op, target if op == "call_function" else None)][copied] = None
            written.append(copied)
            env[node] = copied

    def copy_meta(self, source: Node, target: Node) -> None:
        """Gives `target` a copy of the metadata of `source`."""
        if source.meta:
            copy_meta(source.meta, target.meta, self._metas)

    def close(self) -> Graph:
        """The graph, with its node count and its table of names."""
        if self._written:
            self.graph._len += len(self._written)
            self.graph._graph_namespace._obj_to_name.update({node: node.name for node in self._written})
            self._written = []
        return self.graph

    def _create(
        self, op: str, target: Any, args: Any, kwargs: Mapping[str, Any] | None, *, name: str, type_expr: Any
    ) -> Node:
        """The public way; the name was taken in advance, so it is given back first."""
        self.graph._graph_namespace._used_names.discard(name)
        node = self.graph.create_node(op, target, args, dict(kwargs or {}), name, type_expr)
        assert node.name == name
        return node


def copy_meta(source: Mapping[str, Any], target: dict[str, Any], memo: dict[int, Any]) -> None:
    """Copies metadata with its nested containers, so that an edit of one graph never shows in the other.

    `memo` keeps two nodes that shared a container sharing its copy, as `copy.deepcopy` would.
    """
    target.update(source)
    for key, value in source.items():
        if type(value) in _CONTAINERS:
            target[key] = value.copy() if key in _FLAT else _copied(value, memo)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    known = memo.get(id(value))
    if known is not None:
        return known
    copied: Any = value.copy()
    memo[id(value)] = copied
    for key, item in copied.items() if isinstance(value, dict) else enumerate(copied):
        if type(item) in _CONTAINERS:
            copied[key] = _copied(item, memo)
    return copied


def _has_fast_route() -> bool:
    if _fx_map_arg is None or not hasattr(Node, "_prepend") or not hasattr(Node, "_update_args_kwargs"):
        return False
    graph = Graph()
    return all(hasattr(graph, name) for name in ("_root", "_len", "_graph_namespace", "_find_nodes_lookup_table"))


#: Containers of immutable things, that tracers write on every node.
_FLAT = frozenset(("nn_module_stack", "source_fn_stack", "from_node", "fwd_nn_module_stack", "fwd_source_fn_stack"))
_CONTAINERS = frozenset((dict, list, OrderedDict, defaultdict))
_NO_KWARGS: immutable_dict[str, Any] = immutable_dict()
_FAST = _has_fast_route()
