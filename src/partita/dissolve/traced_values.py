"""Traced values of nodes: reading them, calling a node on them, and setting those of a new node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from partita._torch.dry_runs import refusal_of_call
from partita._torch.fx.graph_writer import GraphWriter, map_nodes
from partita.analysis.effects.terms import nodes_in
from partita.analysis.nodes import VALUE_KEYS, attribute_of, value_of
from partita.dissolve._torch.sandbox import FakeSandbox
from partita.errors import ModeError, OptionError
from partita.program.program import Program


def sandbox_for(program: Program) -> FakeSandbox:
    """A sandbox for the nodes of `program`."""
    return FakeSandbox(value_of(node) for node in program.index.nodes)


def has_value(node: Node) -> bool:
    """Whether the value of `node` was traced."""
    return any(key in node.meta for key in VALUE_KEYS)


def value_read(program: Program, node: Node) -> Any:
    """The value that users of `node` read, as it was traced."""
    if node.op == "get_attr":
        return attribute_of(program.graph_module, node)
    if has_value(node):
        return value_of(node)
    if node in program.modes.read:
        return None
    raise OptionError(
        f"node {node.name!r} has no traced value, so the effect of the modes around it is unknown: "
        f"{node.format_node()}; capture the model with partita.capture(model, args), or trace it with "
        "torch.fx.experimental.proxy_tensor.make_fx(..., pre_dispatch=True)"
    )


def can_carry_gradients(tensor: Tensor) -> bool:
    """Whether the dtype of a tensor is differentiable."""
    return tensor.is_floating_point() or tensor.is_complex()


def nodes_read(node: Node) -> list[Node]:
    """The nodes among the arguments of `node`, once for every occurrence."""
    return list(nodes_in((node.args, node.kwargs)))


def call_with(node: Node, values: Sequence[Any]) -> Callable[[], Any]:
    """A call of the target of `node`, with one value for each node among its arguments.

    Raises where torch would crash at an argument.
    """
    remaining = iter(values)
    args, kwargs = map_nodes((node.args, dict(node.kwargs)), lambda _: next(remaining))
    target: Any = node.target
    why = refusal_of_call(target, args, kwargs)
    if why is not None:
        raise ModeError(f"node {node.name!r} is not tried on fake tensors: {why}; correct it: {node.format_node()}")
    if node.op == "call_method":
        return lambda: getattr(args[0], target)(*args[1:], **kwargs)
    if node.op == "call_function":
        return lambda: target(*args, **kwargs)
    raise OptionError(
        f"node {node.name!r} calls the module {target!r}, so the effect of the modes around it is unknown; "
        "trace the model into operators, for example with partita.capture(model, args)"
    )


def write_beside(
    writer: GraphWriter,
    node: Node,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    value: Any,
    name: str | None = None,
) -> Node:
    """A new node with the metadata of `node` and a traced value of its own."""
    made = writer.write("call_function", target, args, kwargs, name=name or writer.names.fresh_for(target))
    writer.copy_meta(node, made)
    key = next((key for key in VALUE_KEYS if key in node.meta), VALUE_KEYS[0])
    for stale in (*VALUE_KEYS, "tensor_meta", "unbacked_bindings"):
        made.meta.pop(stale, None)
    made.meta[key] = value
    return made
