"""Traced values: what nodes read and give, for whoever tries a node before it runs or writes a new one beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from partita._torch.dry_runs import refusal_of_call
from partita._torch.fake_sandbox import FakeSandbox
from partita._torch.fx.graph_writer import GraphWriter, map_nodes
from partita.analysis.nodes import VALUE_KEYS, attribute_of, value_of
from partita.errors import ModeError, OptionError
from partita.program.program import Program

__all__ = ["call_with", "can_carry_gradients", "has_value", "nodes_read", "stage_of", "value_read", "write_beside"]


def stage_of(program: Program) -> FakeSandbox:
    """A stage for the nodes of `program`."""
    return FakeSandbox(value_of(node) for node in program.index.nodes)


def has_value(node: Node) -> bool:
    """Whether the trace that `node` comes from has noted its value."""
    return any(key in node.meta for key in VALUE_KEYS)


def value_read(program: Program, node: Node) -> Any:
    """What whoever reads `node` gets, as far as it was traced."""
    if node.op == "get_attr":
        return attribute_of(program.graph_module, node)
    if has_value(node):
        return value_of(node)
    if node in program.modes.read:
        return None
    raise OptionError(
        f"node {node.name!r} has no traced value, so nobody can say what the modes around it come down to: "
        f"{node.format_node()}; capture the model with partita.capture(model, args), or trace it with "
        "torch.fx.experimental.proxy_tensor.make_fx(..., pre_dispatch=True)"
    )


def can_carry_gradients(tensor: Tensor) -> bool:
    """Whether the numbers in a tensor are of a kind that has gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def nodes_read(node: Node) -> list[Node]:
    """The nodes that `node` reads, once for every place where it mentions one."""
    found: list[Node] = []

    def mention(read: Node) -> Node:
        found.append(read)
        return read

    map_nodes((node.args, dict(node.kwargs)), mention)
    return found


def call_with(node: Node, values: Sequence[Any]) -> Callable[[], Any]:
    """A call of what `node` calls, with one value for each place where it mentions a node.

    Raises where torch would crash at an argument.
    """
    given = iter(values)
    args, kwargs = map_nodes((node.args, dict(node.kwargs)), lambda _: next(given))
    target: Any = node.target
    why = refusal_of_call(target, args, kwargs)
    if why is not None:
        raise ModeError(f"node {node.name!r} is not tried on fake tensors: {why}; correct it: {node.format_node()}")
    if node.op == "call_method":
        return lambda: getattr(args[0], target)(*args[1:], **kwargs)
    if node.op == "call_function":
        return lambda: target(*args, **kwargs)
    raise OptionError(
        f"node {node.name!r} calls the module {target!r}, and nobody can say what the modes around it come down to; "
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
    """A new node that was not traced, with the origin of `node` and a value of its own."""
    made = writer.write("call_function", target, args, kwargs, name=name or writer.names.fresh_for(target))
    writer.copy_meta(node, made)
    key = next((key for key in VALUE_KEYS if key in node.meta), VALUE_KEYS[0])
    for stale in (*VALUE_KEYS, "tensor_meta", "unbacked_bindings"):
        made.meta.pop(stale, None)
    made.meta[key] = value
    return made
