"""A graph as plain data that pickles: every node with its name, target and arguments, nothing traced again."""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from dataclasses import dataclass
from operator import attrgetter
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, Node

from partita._torch.nodes import GraphWriter

__all__ = ["GraphRecord", "graph_from_record", "is_plain", "record_of_graph"]


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """Rows of (op, target, args, kwargs, name, type, metadata), and what generates code from them."""

    rows: tuple[tuple[Any, ...], ...]
    codegen: Any
    tracer_cls: Any


@dataclass(frozen=True, slots=True)
class _Reference:
    row: int


@dataclass(frozen=True, slots=True)
class _Operator:
    namespace: str
    name: str
    overload: str | None


@dataclass(frozen=True, slots=True)
class _Builtin:
    module: str
    name: str


def record_of_graph(graph: Graph) -> GraphRecord:
    """`graph` as data; of the metadata only plain values are kept, since traced tensors do not pickle."""
    references: dict[Node, _Reference] = {}
    rows = []
    for node in graph.nodes:
        rows.append(
            (
                node.op,
                _packed_target(node.target),
                _packed(node.args, references),
                _packed(node.kwargs, references),
                node.name,
                node.type,
                {key: value for key, value in node.meta.items() if is_plain(value)},
            )
        )
        references[node] = _Reference(len(references))
    tracer = graph._tracer_cls
    return GraphRecord(
        tuple(rows), graph._codegen, tracer if tracer and "<locals>" not in tracer.__qualname__ else None
    )


def graph_from_record(record: GraphRecord) -> Graph:
    """The graph that `record_of_graph` wrote down."""
    writer = GraphWriter(record.tracer_cls)
    writer.names.reserve(row[4] for row in record.rows)
    nodes: list[Node] = []
    for op, target, args, kwargs, name, type_expr, meta in record.rows:
        read, named = _unpacked(args, nodes), _unpacked(kwargs, nodes)
        node = writer.write(op, _unpacked_target(target), read, named, name=name, type_expr=type_expr)
        node.meta.update(meta)
        nodes.append(node)
    graph = writer.close()
    graph.set_codegen(record.codegen)
    return graph


def _packed(argument: Any, references: dict[Node, _Reference]) -> Any:
    """Arguments with references for nodes, in ordinary containers."""
    if isinstance(argument, Node):
        return references[argument]
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*(_packed(item, references) for item in argument))
    if isinstance(argument, tuple):
        return tuple(_packed(item, references) for item in argument)
    if isinstance(argument, list):
        return [_packed(item, references) for item in argument]
    if isinstance(argument, dict):
        return {key: _packed(item, references) for key, item in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_packed(item, references) for item in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, OpOverload | OpOverloadPacket | HigherOrderOperator | BuiltinFunctionType):
        return _packed_target(argument)
    if isinstance(argument, torch.memory_format | torch.layout):
        return _Builtin("torch", str(argument).removeprefix("torch."))
    return argument


def _unpacked(argument: Any, nodes: list[Node]) -> Any:
    if isinstance(argument, _Reference):
        return nodes[argument.row]
    if isinstance(argument, _Operator | _Builtin):
        return _unpacked_target(argument)
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*(_unpacked(item, nodes) for item in argument))
    if isinstance(argument, tuple):
        return tuple(_unpacked(item, nodes) for item in argument)
    if isinstance(argument, list):
        return [_unpacked(item, nodes) for item in argument]
    if isinstance(argument, dict):
        return {key: _unpacked(item, nodes) for key, item in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_unpacked(item, nodes) for item in (argument.start, argument.stop, argument.step)))
    return argument


def _packed_target(target: Any) -> Any:
    if isinstance(target, OpOverload):
        name, overload = target._schema.name.partition("::")[2], target._overloadname
        return _Operator(target.namespace, name, overload)
    if isinstance(target, OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return _Operator(namespace, name, None)
    if isinstance(target, HigherOrderOperator):
        return _Operator("higher_order", target.name(), None)
    if isinstance(target, BuiltinFunctionType) and isinstance(target.__self__, ModuleType):
        # The older protocols of pickle, which torch.save uses, would try to store the module itself.
        return _Builtin(target.__self__.__name__, target.__name__)
    return target


def _unpacked_target(target: Any) -> Any:
    if isinstance(target, _Builtin):
        return attrgetter(target.name)(_module(target.module))
    if not isinstance(target, _Operator):
        return target
    packet = getattr(getattr(torch.ops, target.namespace), target.name)
    return packet if target.overload is None else getattr(packet, target.overload)


def _module(path: str) -> Any:
    """A module by its path; some of torch's are attributes of others and cannot be imported."""
    package, _, rest = path.partition(".")
    module = importlib.import_module(package)
    return sys.modules.get(path) or (attrgetter(rest)(module) if rest else module)


_PLAIN = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device)


def is_plain(value: Any) -> bool:
    """Whether `value` is nothing but numbers, text and containers of them."""
    if type(value) in _PLAIN or isinstance(value, torch.dtype):
        return True
    if type(value) in (tuple, list, set, frozenset, torch.Size):
        return all(map(is_plain, value))
    if type(value) in (dict, OrderedDict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return False
