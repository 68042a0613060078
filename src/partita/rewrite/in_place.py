"""In-place edits of a graph, where torch's own functions edit in place: inlining one call, inserting one call.

Everything is checked before anything is changed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.fx.graph_writer import copy_meta, map_nodes
from partita._torch.fx.lazy_graph_module import blank_module
from partita._torch.nn_modules import runs_its_graph
from partita._torch.operator_schemas import OPERATORS
from partita.analysis.modes import has_toggles
from partita.analysis.nodes import attribute_of, find
from partita.errors import BrokenGraphError, ModeError, OptionError
from partita.program.program import Program, effect_successors, program_being_edited
from partita.rewrite.fuse import values_of_call
from partita.rewrite.inline import bound_arguments, returned_value
from partita.rewrite.state import place, share_state


class InlineError(OptionError, AssertionError):
    """The node is no call of a body that can be inlined."""


class _NoGraphError(InlineError, AttributeError):
    """The called module has no graph."""


def inline_call(call: Node) -> GraphModule:
    """The module around `call`, with a copy of the nodes of the body in place of the call.

    Submodules that are then unused are removed.
    """
    root = _root_of(call)
    body = _body_of(root, call)
    output = _output_of(body)
    inputs = bound_arguments(call, body.graph)
    targets = {node: attribute_of(body, node) for node in body.graph.nodes if node.op in ("call_module", "get_attr")}
    returned = None if output is None else returned_value(call, output)
    with call.graph.inserting_before(call):
        env = {
            placeholder: as_node(call.graph, value, placeholder) if needs_one_object(value, placeholder) else value
            for placeholder, value in inputs.items()
        }
        metas: dict[int, Any] = {}
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            target = share_attribute(root, body, str(node.target), targets[node]) if node in targets else node.target
            args, kwargs = map_nodes((node.args, node.kwargs), env.__getitem__)
            env[node] = call.graph.create_node(node.op, target, args, dict(kwargs), node.name, node.type)
            copy_meta(node.meta, env[node].meta, metas)
    replace_by(call, map_nodes(returned, env.__getitem__))
    drop_unused_modules(root)
    root.recompile()
    return root


def insert_call(
    root: GraphModule,
    body: GraphModule,
    name: str,
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    *,
    after: Node,
    is_bare: bool,
) -> Node:
    """A call of `body`, as submodule `name`, after `after`, whose results replace `outputs`.

    The replaced nodes stay and are to be erased by the caller. Users of the results that come before the call move
    after it, with all that must follow them.
    """
    replaced = _computing(outputs, inputs)
    readers = {node: [user for user in node.users if user not in replaced] for node in outputs}
    after = max((after, *inputs))
    early = [user for users in readers.values() for user in users if user < after]
    moving = _with_successors(root, early, after, replaced) if early else []
    place(root, name, body)
    graph = root.graph
    with graph.inserting_after(after):
        call = graph.call_module(name, tuple(inputs))
    results = [call] if is_bare else _items(graph, call, len(outputs))
    for node, result in zip(outputs, results, strict=True):
        result.meta.update(node.meta)
        others = readers[node]
        node.replace_all_uses_with(result, delete_user_cb=frozenset(others).__contains__)
    if outputs and not is_bare:
        call.meta.update(values_of_call(outputs))
    last = results[-1] if results else call
    for node in reversed(moving):
        last.append(node)
    return call


def _root_of(call: Node) -> GraphModule:
    if not isinstance(call, Node):
        raise InlineError(f"a call is inlined by its node, not by {type(call).__name__}")
    if call.op != "call_module":
        raise InlineError(f"expected call_module op, got {call.op}: node {call.name!r} calls no module")
    if call._erased:
        raise InlineError(f"node {call.name!r} is no longer in its graph: it was erased or inlined before")
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
    prefix = f"node {call.name!r} calls {call.target!r}, which cannot be inlined"
    if not isinstance(body, GraphModule):
        raise _NoGraphError(f"{prefix}: {type(body).__name__} has no graph; trace it into a torch.fx.GraphModule")
    if body is root or body.graph is call.graph:
        raise InlineError(f"{prefix}: it is the module that makes the call")
    if not runs_its_graph(body):
        raise InlineError(f"{prefix}: it has hooks, or a `forward` of its own, which would be lost; remove them first")
    return body


def _output_of(body: GraphModule) -> Node | None:
    """The output node of a body; torch's pieces without results have none."""
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


def needs_one_object(value: Any, node: Node) -> bool:
    """Whether `value` must be created once, by a node, to replace `node`.

    A literal is created for each user, so none may mutate it; and numbers have no methods in generated code.
    """
    if isinstance(value, Node):
        return False
    has_method_called = any(user.op == "call_method" and user.args[:1] == (node,) for user in node.users)
    return has_method_called or (_is_mutable(value) and any(map(_may_mutate, node.users)))


def _is_mutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    return isinstance(value, list | dict)


def _may_mutate(user: Node) -> bool:
    """Whether a node may mutate a list or dict argument: torch's own functions and reading an item do not."""
    if user.op == "output":
        return False
    target = user.target
    if user.op != "call_function" or target in (operator.setitem, operator.delitem):
        return True
    module = getattr(target, "__module__", None) or ""
    return not (target is operator.getitem or isinstance(target, OPERATORS) or module.split(".")[0] == "torch")


def as_node(graph: Graph, value: Any, like: Node) -> Node:
    """A node that returns `value`, with the metadata of `like`."""
    made = graph.call_function(operator.getitem, ((value,), 0))
    copy_meta(like.meta, made.meta, {})
    return made


def share_attribute(root: nn.Module, body: nn.Module, target: str, value: Any) -> str:
    """The path on `root` of the attribute that `body` has at `target`, set if it is missing.

    It is the same path if that is free or has this very object; else `submod_1` and so on, as in torch.
    """
    if value is not None and find(root, target) is value:
        return target
    path, number = target, 0
    while hasattr(root, path.partition(".")[0]):
        number += 1
        path = f"submod_{number}"
    folder, _, name = target.rpartition(".")
    owner = find(body, folder) if folder else body
    is_buffer = isinstance(owner, nn.Module) and name in owner._buffers
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not is_buffer:
        place(root, path, None)  # A tensor that is no state, a constant of the graph say, stays a plain attribute.
        folder, _, name = path.rpartition(".")
        holder = find(root, folder) if folder else root
        holder.__dict__[name] = value
    else:
        place(root, path, value, persistent=is_buffer and name not in owner._non_persistent_buffers_set)
    return path


def replace_by(node: Node, value: Any) -> None:
    """Replaces `node` by `value`, a constant or a container of nodes, and erases it; reads of items get the item."""
    graph = node.graph
    if not isinstance(value, Node) and needs_one_object(value, node):
        with graph.inserting_before(node):
            value = as_node(graph, value, node)
    if isinstance(value, Node):
        node.replace_all_uses_with(value)
    else:
        for user in list(node.users):
            found, item = _item_taken(user, node, value)
            if found:
                replace_by(user, item)
        for user in list(node.users):
            user.args, user.kwargs = map_nodes((user.args, user.kwargs), lambda read: value if read is node else read)
    graph.erase_node(node)


def _item_taken(user: Node, node: Node, value: Any) -> tuple[bool, Any]:
    """Whether `user` takes a known item out of the container `value`, which replaces `node`, and the item."""
    if user.target is not operator.getitem or len(user.args) != 2 or user.args[0] is not node:
        return False, None
    index = user.args[1]
    is_index = isinstance(value, dict) or (isinstance(value, tuple | list) and isinstance(index, int | slice))
    try:
        return (True, value[index]) if is_index else (False, None)
    except (LookupError, TypeError):  # The program still raises when it runs.
        return False, None


def drop_unused_modules(root: GraphModule) -> None:
    """Removes submodules of `root` that no node names.

    A named module stays whole (torch 2.13 empties one that is read by get_attr), and modules that may be shared are not
    changed: a plain container is replaced by a smaller one.
    """
    nodes = (*root.graph.find_nodes(op="call_module", sort=False), *root.graph.find_nodes(op="get_attr", sort=False))
    named = {node.target for node in nodes if isinstance(node.target, str)}
    folders = {folder for path in named for folder in accumulate(path.split(".")[:-1], "{}.{}".format)}
    unused = list(_unused(root, "", named, folders))
    for name, child in list(root._modules.items()):
        inside = frozenset(path.removeprefix(f"{name}.") for path in unused if path.startswith(f"{name}."))
        if name in unused:
            del root._modules[name]
        elif inside and child is not None:
            root._modules[name] = blank_module(training=child.training)
            share_state(child, root._modules[name], without=inside)  # type: ignore[arg-type]


def _unused(module: nn.Module, prefix: str, named: Set[str], folders: Set[str]) -> Iterator[str]:
    """The paths of modules that are not named, nor inside or around one that is."""
    for name, child in module._modules.items():
        path = f"{prefix}{name}"
        if path in named or child is None:
            continue
        if path not in folders:
            yield path
        elif type(child) is nn.Module:
            yield from _unused(child, f"{path}.", named, folders)


def _items(graph: Graph, call: Node, count: int) -> list[Node]:
    results: list[Node] = []
    for item in range(count):
        with graph.inserting_after(results[-1] if results else call):
            results.append(graph.call_function(operator.getitem, (call, item)))
    return results


def _computing(outputs: Iterable[Node], inputs: Iterable[Node]) -> set[Node]:
    """The nodes by which `outputs` are computed from `inputs`."""
    stops, found, waiting = set(inputs), set[Node](), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in stops and node not in found and node.op != "placeholder":
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _with_successors(root: GraphModule, early: Iterable[Node], last: Node, replaced: set[Node]) -> list[Node]:
    """The early nodes and all that must follow them, up to `last`, in graph order."""
    program = program_being_edited(root)
    successors = effect_successors(program)
    found, waiting = set[Node](), list(early)
    while waiting:
        node = waiting.pop()
        if node not in found and node not in replaced and node < last:
            found.add(node)
            waiting += (*node.users, *successors.get(node, ()))
    moving = sorted(found)
    if has_toggles(root.graph):
        _check_modes(program, moving, last)
    return moving


def _check_modes(program: Program, moving: Iterable[Node], last: Node) -> None:
    modes, number = program.modes, program.index.number
    for node in moving:
        if node.op != "get_attr" and modes.at(number[node]) != modes.at(number[last]):
            raise ModeError(
                f"the call would come after {last.name!r}, and {node.name!r}, which reads it, runs in another mode "
                "before that; fuse with `fuse_by_partitions`, which rewrites the modes"
            )
