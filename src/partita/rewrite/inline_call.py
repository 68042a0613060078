"""Inlining one call in place: the nodes of the body stand where the call stood, and the body is left as it was."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, GraphModule, Node

from partita._torch.nodes import copy_meta, map_nodes
from partita.errors import BrokenGraphError, OptionError
from partita.graphs.attributes import attribute_of
from partita.graphs.faithful import runs_its_graph
from partita.rewrite.call_binding import bound_arguments, returned_value
from partita.rewrite.drop_modules import drop_unused_modules
from partita.rewrite.literals import as_node, needs_one_object, replace_by
from partita.rewrite.take_attributes import take_attribute

__all__ = ["InlineError", "inline_call"]


class InlineError(OptionError, AssertionError):
    """A node that was to be inlined is no call of a body that can be."""


class _NoGraphError(InlineError, AttributeError):
    """What a call names has no graph."""


def inline_call(call: Node) -> GraphModule:
    """The module around `call`, with the nodes of the called body in place of the call.

    Everything is checked before anything is changed. Modules that no node names any more are taken out.
    """
    root = _root_of(call)
    body = _body_of(root, call)
    output = _output_of(body)
    inputs = bound_arguments(call, body.graph)
    targets = {node: attribute_of(body, node) for node in body.graph.nodes if node.op in ("call_module", "get_attr")}
    returned = None if output is None else returned_value(call, output)
    with call.graph.inserting_before(call):
        env = {placeholder: _given(call.graph, placeholder, value) for placeholder, value in inputs.items()}
        metas: dict[int, Any] = {}
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            target = take_attribute(root, body, str(node.target), targets[node]) if node in targets else node.target
            env[node] = _copied(call.graph, node, env, target)
            copy_meta(node.meta, env[node].meta, metas)
    replace_by(call, map_nodes(returned, env.__getitem__))
    drop_unused_modules(root)
    root.recompile()
    return root


def _root_of(call: Node) -> GraphModule:
    if not isinstance(call, Node):
        raise InlineError(f"a call is inlined by its node, not by {type(call).__name__}")
    if call.op != "call_module":
        raise InlineError(f"expected call_module op, got {call.op}: node {call.name!r} calls no module")
    if call._erased:
        raise InlineError(f"node {call.name!r} is not in its graph any more: it was erased or inlined before")
    root = call.graph.owning_module
    if not isinstance(root, GraphModule):
        raise InlineError(
            f"owning_module should not be None: the graph of {call.name!r} belongs to no module; make one of it with "
            "torch.fx.GraphModule"
        )
    if not isinstance(call.target, str):
        raise InlineError(f"expected target to be str, got {type(call.target).__name__}, on node {call.name!r}")
    return root


def _body_of(root: GraphModule, call: Node) -> GraphModule:
    body = attribute_of(root, call)
    told = f"node {call.name!r} calls {call.target!r}, which cannot be inlined"
    if not isinstance(body, GraphModule):
        raise _NoGraphError(f"{told}: {type(body).__name__} has no graph; trace it into a torch.fx.GraphModule")
    if body is root or body.graph is call.graph:
        raise InlineError(f"{told}: it is the module that makes the call")
    if not runs_its_graph(body):
        raise InlineError(f"{told}: it has hooks, or a `forward` of its own, which would be lost; remove them first")
    return body


def _output_of(body: GraphModule) -> Node | None:
    """The node that says what a body returns; torch cuts pieces that return nothing, without one."""
    outputs = [node for node in body.graph.nodes if node.op == "output"]
    if len(outputs) > 1:
        names = ", ".join(repr(node.name) for node in outputs)
        raise InlineError(f"expected exactly 1 output with 1 arg, got {len(outputs)} outputs: {names}")
    if outputs and len(outputs[0].args) != 1:
        raise InlineError(f"expected exactly 1 output with 1 arg, got {len(outputs[0].args)} args")
    seen: set[Node] = set()
    for node in body.graph.nodes:
        stray = next((read for read in node.all_input_nodes if read not in seen), None)
        if stray is not None:
            raise BrokenGraphError(
                f"in the body of the call, node {node.name!r} reads {stray.name!r}, which does not come before it"
            )
        seen.add(node)
    return outputs[0] if outputs else None


def _given(graph: Graph, placeholder: Node, value: Any) -> Any:
    """What the nodes that read an input of the body read instead."""
    return as_node(graph, value, placeholder) if needs_one_object(value, placeholder) else value


def _copied(graph: Graph, node: Node, env: dict[Node, Any], target: Any) -> Node:
    args, kwargs = map_nodes((node.args, node.kwargs), env.__getitem__)
    return graph.create_node(node.op, target, args, dict(kwargs), node.name, node.type)
