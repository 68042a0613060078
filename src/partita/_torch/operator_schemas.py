"""What torch declares about a target: operator schemas, tags, side effects, aliasing and containers."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen
from torch.fx.node import _side_effectful_functions, has_side_effect
from torch.jit._builtins import _find_builtin

#: Dynamo does not trace the code of this module: it runs around bodies, after a graph break.
DYNAMO_SKIPS = True


def returns_container(target: Any) -> bool:
    """Whether a call of `target` (a function, or the name of a tensor method) always returns a tuple, list or size."""
    return (isinstance(target, str) or has_process_lifetime(target)) and _returns_container(target)


def may_return_container(target: Any) -> bool:
    """Whether a call of `target` returns a tuple or list for some arguments, or has no schema."""
    schemas = _schemas(target)
    return not schemas or any(map(_returns_several, schemas))


@cache
def _returns_container(target: Any) -> bool:
    if target == "size":  # With an argument it returns a number, which is never indexed.
        return True
    schemas = _schemas(target)
    return bool(schemas) and all(map(_returns_several, schemas))


def _schemas(target: Any) -> list[Any]:
    if isinstance(target, OpOverload):
        return [target._schema]
    name = f"aten::{target}" if isinstance(target, str) else _find_builtin(target)
    packet = target if isinstance(target, OpOverloadPacket) else _packet_named(name) if name else None
    schemas = [overload._schema for overload in _overloads(packet)]
    return [schema for schema in schemas if not any(argument.is_out for argument in schema.arguments)]


def _returns_several(schema: Any) -> bool:
    returns = schema.returns
    return len(returns) > 1 or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType))


NO_DEFAULT = object()


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an operator; its position is -1 where only a keyword reaches it."""

    position: int
    name: str
    mutated: bool
    aliased: bool
    default: Any


@dataclass(frozen=True, slots=True)
class Signature:
    """One overload of an operator, as far as effects go."""

    name: str
    arguments: tuple[Argument, ...]
    returns: int
    uses_rng: bool
    may_alias: bool
    is_out: bool


def signatures_of(target: Any) -> tuple[Signature, ...]:
    """The overloads that a call of `target` may reach; none where torch has no schema for it."""
    if isinstance(target, OpOverload):
        return (_signature(target._schema, target.tags),)
    if isinstance(target, OpOverloadPacket):
        return tuple(_signature(overload._schema, overload.tags) for overload in _overloads(target))
    if isinstance(target, HigherOrderOperator):
        return ()
    # An operator of another dialect, such as ExecuTorch's, wraps one of torch's and carries its schema.
    schema = getattr(target, "_schema", None)
    if isinstance(schema, torch.FunctionSchema):
        return (_signature(schema, _tags(schema)),)
    name = _find_builtin(target)
    return _signatures_named(name) if name else ()


def signatures_of_method(name: str) -> tuple[Signature, ...]:
    """The overloads that a call of the tensor method `name` may reach."""
    return _signatures_named(f"aten::{name}")


def is_of_other_library(signature: Signature) -> bool:
    """Whether an operator is none of torch's: of these, those that use the RNG have the tag, or are known."""
    return signature.name.partition("::")[0] not in _TORCH_NAMESPACES


_TORCH_NAMESPACES = frozenset(("aten", "prim", "prims", "_c10d_functional", "_c10d_functional_autograd"))


def base_name(target: Any) -> str:
    """The name of an operator without its overload, or of a function."""
    return str(getattr(target, "__name__", "")).partition(".")[0]


def is_higher_order(target: Any) -> bool:
    """Whether `target` is an operator that runs bodies."""
    return isinstance(target, HigherOrderOperator)


@cache
def is_composite(target: Any) -> bool:
    """Whether an operator is composed of others, which autograd records in its place."""
    if not isinstance(target, OpOverload) or not _is_dispatched(target):
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"))


def registers_hook(target: Any) -> bool:
    """Whether `target` is the operator by which Dynamo (torch 2.13) records `tensor.register_hook`."""
    return is_higher_order(target) and target.name() == "register_hook"


def has_registered_effect(target: Any) -> bool:
    """Whether `target` is registered as having a side effect; not cached, since more may be registered."""
    if target in _side_effectful_functions:
        return True
    return _get_effect is not None and isinstance(target, OpOverload) and _get_effect(target) is not None


def has_keywords(nodes: Iterable[Node]) -> bool:
    """Whether any of these calls passes an argument by keyword."""
    return any(node.kwargs for node in nodes)


def nodes_by_target(graph: Graph) -> Mapping[tuple[str, Any], Collection[Node]]:
    """The nodes of `graph` by op and target (None for all but functions), from the table that torch keeps.

    A target may have no nodes: looking it up leaves an empty entry.
    """
    table = getattr(graph, "_find_nodes_lookup_table", None)
    if table is not None:
        return table.table  # type: ignore[no-any-return]
    found: dict[tuple[str, Any], list[Node]] = {}
    for node in graph.nodes:
        found.setdefault((node.op, node.target if node.op == "call_function" else None), []).append(node)
    return found


def flattens_inputs(graph: Graph) -> bool:
    """Whether a call of the graph takes other arguments than its placeholders say."""
    return type(graph._codegen) is not CodeGen


def storage_key(tensor: Tensor) -> int:
    """A number that two live tensors have in common if they share a storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # Sparse and opaque tensors have no storage of their own.
        return id(tensor)


@cache
def _signatures_named(name: str) -> tuple[Signature, ...]:
    overloads = _overloads(_packet_named(name))
    # TorchScript adds overloads for Python numbers and lists, under names that mean something else for tensors.
    dispatched = [overload for overload in overloads if _is_dispatched(overload)]
    return tuple(_signature(overload._schema, overload.tags) for overload in dispatched or overloads)


def _is_dispatched(overload: OpOverload) -> bool:
    """Whether the dispatcher knows an overload."""
    try:
        overload.has_kernel_for_dispatch_key(torch.DispatchKey.CPU)
    except RuntimeError:
        return False
    return True


def _packet_named(name: str) -> OpOverloadPacket | None:
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return packet if isinstance(packet, OpOverloadPacket) else None


def _overloads(packet: OpOverloadPacket | None) -> list[OpOverload]:
    return [] if packet is None else [getattr(packet, name) for name in packet.overloads()]


def _tags(schema: Any) -> Collection[Any]:
    overload = getattr(_packet_named(schema.name), schema.overload_name or "default", None)
    return getattr(overload, "tags", ())


def _signature(schema: Any, tags: Collection[Any]) -> Signature:
    returned = [result.alias_info for result in schema.returns if result.alias_info is not None]
    return Signature(
        name=schema.name,
        arguments=tuple(_argument(i, argument, returned) for i, argument in enumerate(schema.arguments)),
        returns=len(schema.returns),
        uses_rng=torch.Tag.nondeterministic_seeded in tags,
        may_alias=_MAY_ALIAS in tags,
        is_out=any(argument.is_out for argument in schema.arguments),
    )


def _argument(position: int, argument: Any, returned: list[Any]) -> Argument:
    alias = argument.alias_info
    return Argument(
        position=-1 if argument.kwarg_only else position,
        name=argument.name,
        mutated=alias is not None and alias.is_write,
        aliased=alias is not None and any(_overlap(alias, result) for result in returned),
        default=argument.default_value if argument.has_default_value() else NO_DEFAULT,
    )


def _overlap(argument: Any, result: Any) -> bool:
    """Whether two alias sets may name one storage; lists and wildcards have empty sets or a star."""
    given, got = argument.before_set | argument.after_set, result.before_set
    return not given or not got or "*" in given or "*" in got or not given.isdisjoint(got)


try:
    from torch._higher_order_ops.effects import _get_effect
except ImportError:
    _get_effect = None  # type: ignore[assignment]
_MAY_ALIAS = getattr(torch.Tag, "maybe_aliasing_or_mutating", None)


def mutated_nodes(node: Node) -> list[Node]:
    """The nodes whose tensors an operator with a schema mutates; lists of tensors item by item."""
    if not isinstance(node.target, OpOverload):
        return []
    mutated: list[Node] = []
    for place, argument in enumerate(node.target._schema.arguments):
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            items = value if isinstance(value, tuple | list) else (value,)
            mutated += [item for item in items if isinstance(item, Node)]
    return mutated


def viewed_node(node: Node) -> Node | None:
    """The node that the result of this one aliases: a view of it, or itself after a mutation; None if it is new."""
    if node.target is operator.getitem:
        source = node.args[0]
    elif isinstance(node.target, OpOverload) and any(value.alias_info for value in node.target._schema.returns):
        source = node.args[0] if node.args else None
    else:
        source = None
    return source if isinstance(source, Node) else None


# Operators by name, and whether a target lives as long as the process.


def has_process_lifetime(target: Any) -> bool:
    """Whether `target` is an operator, a builtin or an attribute of its module, so that it may be a cache key."""
    if isinstance(target, OpOverload | OpOverloadPacket | BuiltinFunctionType):
        return True
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    name = getattr(target, "__qualname__", None)
    return module is not None and name is not None and getattr(module, name, None) is target


#: What is wrong with a text argument that a file gives, by operator and argument; who defines an operator adds a check.
TEXT_CHECKS: dict[tuple[str, str], Callable[[str], str | None]] = {}

#: The classes of the objects in `torch.ops`; they print as their qualified name.
OPERATORS = (OpOverload, OpOverloadPacket)

SYM_SIZE = torch.ops.aten.sym_size.int


def qualified_names(call: Node) -> tuple[str, ...]:
    """The names by which users refer to a called function in torch's passes; for an overload also its packet's."""
    from torch.fx.passes.tools_common import get_node_target

    try:
        name = get_node_target({}, call)
    except (RuntimeError, AttributeError, TypeError):  # A lambda or a callable object may have none.
        return ()
    return (name, name.rpartition(".")[0]) if isinstance(call.target, OpOverload) else (name,)


# torch's own operators that run a body as one unit, or under a mode.


WRAP = torch.ops.higher_order.wrap
WRAP_WITH_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
#: It leaves its mode switched when its body raises (seen in torch 2.13), so callers restore it.
WRAP_WITH_SET_GRAD_ENABLED = torch.ops.higher_order.wrap_with_set_grad_enabled

for _operator in (WRAP, WRAP_WITH_AUTOCAST, WRAP_WITH_SET_GRAD_ENABLED):
    # torch considers them pure, so its dead-code elimination would delete a body that only mutates (torch 2.13).
    has_side_effect(_operator)
