"""Fast creation of fx nodes and their names: the same as by `Graph.create_node`, several times faster."""

from __future__ import annotations

import builtins
import keyword
import operator
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from typing import Any
from unicodedata import normalize

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.immutable_collections import immutable_dict
from torch.fx.node import map_arg

from partita._torch.operator_schemas import has_process_lifetime

# Without these the public functions are used, which are slower.
_NodeBase: Any = getattr(torch._C, "_NodeBase", None)
_fx_map_arg: Callable[[Any, Callable[[Node], Any]], Any] | None = getattr(torch._C, "_fx_map_arg", None)

#: Names that no node has: they stand for something else in the code that torch generates.
NAMES_OF_CODE = frozenset(
    (*keyword.kwlist, *vars(builtins), "NoneType", "device", "fx_pytree", "inf", "nan", "pytree", "torch")
)

#: The inputs of a node, each once, as the keys of a dict, in argument order.
input_nodes: Callable[[Node], Mapping[Node, None]] = operator.attrgetter("_input_nodes")

#: `map_nodes(argument, swap)`: `argument` with `swap(node)` in place of every node inside it.
map_nodes: Callable[[Any, Callable[[Node], Any]], Any] = _fx_map_arg or map_arg


class GraphWriter:
    """Appends nodes to one new graph; call `close` once before the graph is used.

    `Graph.create_node` walks all arguments as a pytree, finds a name, and updates three tables entry by entry.
    A writer takes names that are known to be free and fills the tables in bulk.
    """

    def __init__(self, tracer_cls: type[Any] | None = None) -> None:
        self.graph = Graph(tracer_cls=tracer_cls)
        self.names = Names(self.graph)
        self._written: list[Node] = []
        self._metas: dict[int, Any] = {}

    @classmethod
    def like(cls, graph: Graph) -> GraphWriter:
        """Writes a graph that has the tracer class of another one."""
        return cls(graph._tracer_cls)

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
        kwargs = node.kwargs
        copied = self.write(
            node.op,
            node.target if target is None else target,
            map_nodes(node.args, swap),
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
            op, target, kwargs = node.op, node.target, node.kwargs
            copied = make(Node)
            begin(copied, graph, name, op, target, node.type)
            copied._update_args_kwargs(map_nodes(node.args, lookup), map_nodes(kwargs, lookup) if kwargs else kwargs)
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
        """Creates the node by the public function; the name was reserved, so it is released first."""
        self.graph._graph_namespace._used_names.discard(name)
        node = self.graph.create_node(op, target, args, dict(kwargs or {}), name, type_expr)
        assert node.name == name
        return node


def copy_meta(source: Mapping[str, Any], target: dict[str, Any], memo: dict[int, Any]) -> None:
    """Copies metadata with its nested containers, so that an edit of one graph never affects the other.

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


#: Containers of immutable items that tracers put on every node.
_FLAT = frozenset(("nn_module_stack", "source_fn_stack", "from_node", "fwd_nn_module_stack", "fwd_source_fn_stack"))
_CONTAINERS = frozenset((dict, list, OrderedDict, defaultdict))
_NO_KWARGS: immutable_dict[str, Any] = immutable_dict()
_FAST = _has_fast_route()


# Node names: those that `Graph.create_node` would choose, without a regular expression for each.


#: Attributes that `ExportedProgram.module` adds to the module that it makes.
ADDED_BY_EXPORT = frozenset(("_guards_fn", "_in_spec", "_out_spec", "validate_inputs"))


@cache
def attributes_of_graph_modules() -> frozenset[str]:
    """The attributes of graph modules, also of those that torch.export makes: no parameter, buffer or module is one."""
    return ADDED_BY_EXPORT.union(dir(GraphModule(nn.Module(), Graph())))


def identifier(text: str) -> str:
    """The text, normalized as Python normalizes identifiers, with `_` for invalid characters."""
    return re.sub(r"\W", "_", normalize("NFKC", text))


class FreeNames:
    """Names that are taken one after the other; one that is taken already, or `is_taken` elsewhere, is numbered."""

    def __init__(self, is_taken: Callable[[str], bool] = lambda _: False) -> None:
        self._is_taken = is_taken
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def take(self, wanted: str) -> str:
        """A free name like `wanted`."""
        count = self._counts.get(wanted, 0)
        name = f"{wanted}_{count}" if count else wanted
        while name in self._taken or self._is_taken(name):
            count += 1
            name = f"{wanted}_{count}"
        self._counts[wanted] = count
        self._taken.add(name)
        return name


class Names:
    """The names of one graph, shared with the graph's own table, so that later names stay unique too."""

    def __init__(self, graph: Graph) -> None:
        namespace = graph._graph_namespace
        self._used, self._counts = namespace._used_names, namespace._base_count

    @classmethod
    def continuing(cls, graph: Graph) -> Names:
        """The names that new nodes of `graph` would get, without reserving them."""
        names, namespace = cls(Graph()), graph._graph_namespace
        names._used.update(namespace._used_names)
        names._counts.update(namespace._base_count)
        return names

    def reserve(self, names: Any) -> None:
        """Reserves `names`, which must be free."""
        self._used.update(names)

    def fresh(self, candidate: str) -> str:
        """A free name like `candidate`, numbered where that is taken."""
        return self._free(*_parse(candidate))

    def fresh_for(self, target: Any) -> str:
        """The name that torch would give to the next node with this target."""
        if type(target) is str:
            return self._free(*_parse_target(target))
        # Hashing an operator runs Python code, so the key is its identity; the entry keeps its target alive.
        known = _CANDIDATES.get(id(target))
        if known is None:
            known = (target, _parse(_GRAPH._target_to_str(target)))
            if has_process_lifetime(target):
                _CANDIDATES[id(target)] = known
        return self._free(*known[1])

    def fresh_for_all(self, targets: Iterable[Any]) -> list[str]:
        """`fresh_for` of each target in turn: one tight loop, since every node of a graph may be named here."""
        used, counts, candidates, names = self._used, self._counts, _CANDIDATES, []
        for target in targets:
            known = candidates.get(id(target))
            if known is None or known[1][2] is not None or known[1][0] in _ILLEGAL_NAMES:
                names.append(self.fresh_for(target))
                continue
            candidate, base, _ = known[1]
            count = counts.get(base, 0)
            while candidate in used:
                count += 1
                candidate = f"{base}_{count}"
            used.add(candidate)
            counts[base] = count
            names.append(candidate)
        return names

    def _free(self, candidate: str, base: str, suffix: str | None) -> str:
        used, counts = self._used, self._counts
        if suffix is None or candidate in used:
            count = counts.get(base, 0)
            if candidate in _ILLEGAL_NAMES:
                count += 1
                candidate = f"{base}_{count}"
        else:
            count = int(suffix)
        while candidate in used:
            count += 1
            candidate = f"{base}_{count}"
        used.add(candidate)
        counts[base] = count
        return candidate


def _parse(candidate: str) -> tuple[str, str, str | None]:
    match = _NAME.fullmatch(candidate)
    if match is None:
        candidate = _OTHER_CHARACTERS.sub("_", candidate) or "_unnamed"
        candidate = f"_{candidate}" if candidate[0].isdigit() else candidate
        match = _NAME.fullmatch(candidate)
        assert match is not None
    base, suffix = match.group(1, 2)
    return candidate, base, suffix


@lru_cache(maxsize=1 << 16)
def _parse_target(target: str) -> tuple[str, str, str | None]:
    return _parse(_GRAPH._target_to_str(target))


#: An identifier, and the number at its end, as torch (2.13) counts up names.
_NAME = re.compile(r"([a-zA-Z_]\w*?)(?:_(\d+))?", re.ASCII)
_OTHER_CHARACTERS = re.compile(r"\W+", re.ASCII)
#: torch (2.13) allows a node named `self`, which shadows the module in the generated code.
_ILLEGAL_NAMES = NAMES_OF_CODE | {"self"}
#: What a node with this target would be called, by the identity of the target; functions and operators are few.
_CANDIDATES: dict[int, tuple[Any, tuple[str, str, str | None]]] = {}
_GRAPH = Graph()
