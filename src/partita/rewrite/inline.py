"""Inlining: a call of a body becomes the nodes of the body; the inverse of outlining and of wrapping modes."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from partita._torch.fx.graph_writer import GraphWriter, map_nodes
from partita._torch.gc_pause import gc_paused
from partita._torch.nn_modules import runs_its_graph
from partita._torch.operator_schemas import SYM_SIZE, flattens_inputs
from partita.analysis.index import Index
from partita.analysis.modes import AMBIENT, Block, Grad, Mode, Setting, has_toggles, modes_of
from partita.analysis.nodes import attribute_of, bodies_of, bodies_read, find
from partita.errors import ModeError, OptionError
from partita.program.program import Program
from partita.rewrite.mode_nodes import ModeWriter, runs_body, setting_of
from partita.rewrite.outline import with_bodies
from partita.rewrite.state import is_persistent, module_like, place, share_state


def inline(program: Program | GraphModule | ExportedProgram, calls: Collection[str] | str | None = None) -> Program:
    """A new program with the bodies of these calls, by node name, in their place; of all bodies, at any depth, if None.

    Calls of graph modules and of operators that run a body under a mode, or just run it, can be inlined. A body is
    copied, so that other calls of it stay valid. A module with hooks, or with nested containers as arguments, or that
    leaves a mode switched, stays a call.
    """
    program = Program.of(program)
    with gc_paused():
        if calls is None:
            return _inlined_at_any_depth(program, _calls_in)
        chosen = _chosen(program, [calls] if isinstance(calls, str) else calls)
        return Inlining(program, chosen, lambda body: {}).inlined()


def inline_modes(program: Program) -> Program:
    """A new program with toggles around the bodies of mode blocks, at any depth; other calls of bodies stay.

    It undoes `wrap_modes`; a program without mode operators is returned as it is.
    """
    with gc_paused():
        return _inlined_at_any_depth(program, _mode_calls_in) if _has_calls(program, _mode_calls_in) else program


def bound_arguments(
    call: Node, graph: Graph, operands: Sequence[Any] | None = None, keywords: Mapping[str, Any] | None = None
) -> dict[Node, Any]:
    """The argument of `call` for each input of the body `graph`: by position, by keyword, or its default.

    The operands are all arguments of the call, unless it is an operator that takes others before them.
    """
    positional = call.args if operands is None else operands
    named = call.kwargs if keywords is None else keywords
    inputs = graph.find_nodes(op="placeholder")
    trees = _trees_of(call, graph)
    if trees is None:
        parameters = [(str(node.target), node.args) for node in inputs]
        return dict(zip(inputs, _bound(call, parameters, positional, named), strict=True))
    parameters = [(name, ()) for name in trees.orig_args]
    arguments = dict(zip(trees.orig_args, map(_plain, _bound(call, parameters, positional, named)), strict=True))
    by_position, by_name = trees.in_spec.children()
    leading = trees.orig_args[: by_position.num_children]
    names = by_name.context or trees.orig_args[by_position.num_children :]
    value = (tuple(arguments[name] for name in leading), {name: arguments[name] for name in names})
    try:
        return dict(zip(inputs, trees.in_spec.flatten_up_to(value), strict=True))
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(
            f"the arguments of the call {call.name!r} do not have the pytree structure of its body: {error}"
        ) from error


def returned_value(call: Node, output: Node) -> Any:
    """What a body returns, in terms of its own nodes."""
    trees = _trees_of(call, output.graph)
    if trees is None or trees.out_spec is None:
        return output.args[0]
    flat: Any = output.args[0]
    value = trees.out_spec.unflatten(list(flat))
    if not _can_be_argument(value):
        raise OptionError(
            f"the body of the call {call.name!r} returns {type(value).__name__}, which cannot be an argument of a "
            "node; return tuples, lists or dicts"
        )
    return value


#: Finds the calls of a program, or of a body, that are inlined.
_FindCalls: TypeAlias = Callable[[Program], Mapping[Node, "BodyCall"]]


def _inlined_at_any_depth(program: Program, calls_in: _FindCalls) -> Program:
    """`program` with these calls inlined, in the bodies of its remaining operators too: the branches of a `cond`."""
    flat, changed = Inlining(program, calls_in(program), calls_in).inlined(), dict[str, GraphModule]()
    for node, body in bodies_read(flat.graph_module, flat.graph.find_nodes(op="get_attr")):
        inner = Program.of(body)
        if str(node.target) not in changed and _has_calls(inner, calls_in):
            changed[str(node.target)] = _inlined_at_any_depth(inner, calls_in).graph_module
    return with_bodies(flat, changed) if changed else flat


def _has_calls(program: Program, calls_in: _FindCalls) -> bool:
    """Whether a program, or a body of its operators at any depth, has such calls."""
    bodies = map(Program.of, bodies_of(program.graph_module))
    return bool(calls_in(program)) or any(_has_calls(body, calls_in) for body in bodies)


def _calls_in(program: Program) -> dict[Node, BodyCall]:
    """The calls of a program that can be inlined."""
    found = {}
    for node in program.index.nodes:
        call = _body_call(program, node)
        if isinstance(call, BodyCall) and _left_behind(call) == AMBIENT:
            found[node] = call
    return found


def _mode_calls_in(program: Program) -> dict[Node, BodyCall]:
    """Those among them that set a mode."""
    return {node: call for node, call in _calls_in(program).items() if call.sets is not None}


def _chosen(program: Program, names: Collection[str]) -> dict[Node, BodyCall]:
    found = {}
    wanted = frozenset(names)
    for node in program.index.nodes:
        call = _body_call(program, node) if node.name in wanted else None
        if isinstance(call, str):
            raise OptionError(f"node {node.name!r} calls {node.target!r}, which cannot be inlined: {call}")
        if call is not None:
            if (left := _left_behind(call)) != AMBIENT:
                raise ModeError(
                    f"the body that {node.name!r} calls leaves {left} behind, so it cannot be inlined; "
                    "close its blocks first"
                )
            found[node] = call
    missing = wanted - {node.name for node in found}
    if missing:
        raise OptionError(f"no call of a body is named {', '.join(sorted(map(repr, missing)))}")
    return found


def _body_call(program: Program, node: Node) -> BodyCall | str | None:
    """`node` as a call of a body; None if it is none, or why it cannot be inlined."""
    read = None
    if node.op == "call_module":
        path, operands = str(node.target), node.args
    else:
        position = runs_body(node)
        if position is None:
            return None
        read = node.args[position] if position < len(node.args) else None
        if not isinstance(read, Node) or read.op != "get_attr":
            return "its body is no attribute of the program"
        path, operands = str(read.target), node.args[position + 1 :]
    body = find(program.graph_module, path)
    return _obstacle(body) or BodyCall(path, body, tuple(operands), dict(node.kwargs), setting_of(node), read)  # type: ignore[arg-type]


def _left_behind(call: BodyCall) -> Mode:
    """The modes that a body leaves switched; an operator that sets modes restores those of its caller."""
    switches = call.sets is None and has_toggles(call.body.graph)
    return modes_of(Index(call.body.graph)).final if switches else AMBIENT


def _obstacle(body: object) -> str | None:
    """Why a body cannot be inlined, or None."""
    if not isinstance(body, GraphModule):
        return "it is no graph module"
    if not runs_its_graph(body):
        return "it has hooks, or a `forward` of its own, which would be lost"
    if flattens_inputs(body.graph):
        return "its inputs and outputs are pytrees that its own code flattens"
    return None


@dataclass(frozen=True, slots=True)
class BodyCall:
    """A call of a body: its path in the program, its arguments, and the setting that it runs under, if any."""

    path: str
    body: GraphModule
    operands: tuple[Any, ...]
    keywords: Mapping[str, Any]
    sets: Setting | None
    #: The node that reads the body for an operator.
    read: Node | None = None


@dataclass(slots=True)
class _Scope:
    """A graph that is being copied: new values for its nodes, and where and in which mode it is called."""

    program: Program
    calls: Mapping[Node, BodyCall]
    env: dict[Node, Any]
    path: str = ""
    around: Mode = AMBIENT
    #: The calls that led here, the outermost first: a body may be called several times.
    calls_around: tuple[Node, ...] = ()
    _modes: dict[int, Mode] = field(default_factory=dict)

    def mode_at(self, number: int) -> Mode:
        """The mode of a node, including that of the call of the graph."""
        mode = self.program.modes.at(number)
        if not self.calls_around:
            return mode
        if id(mode) not in self._modes:
            self._modes[id(mode)] = mode.within(self.around, call=self.calls_around)
        return self._modes[id(mode)]


class Inlining:
    """The flat graph while it is written: inlines `calls`, and in the bodies those that `calls_in` finds."""

    def __init__(self, program: Program, calls: Mapping[Node, BodyCall], calls_in: _FindCalls) -> None:
        self.program, self.calls, self.calls_in = program, calls, calls_in
        self.root = program.graph_module
        self.writer = GraphWriter.like(program.graph)
        self.modes = ModeWriter(self.writer, caller=self.program.caller)
        self.placed: dict[str, Any] = {}
        self.non_persistent: set[str] = set()

    def inlined(self) -> Program:
        scope = _Scope(self.program, self.calls, dict.fromkeys(self.program.modes.read))
        nodes = self.program.index.nodes
        self.writer.names.reserve(node.name for node in nodes if not _vanishes(node, self.calls))
        self._write(scope)
        output = nodes[-1]
        self.modes.end_in(self.program.modes.final)
        self.writer.copy(output, scope.env.__getitem__, name=output.name)
        return self._assembled()

    def _write(self, scope: _Scope) -> None:
        """Everything but the output."""
        toggles, calls, env = scope.program.modes.toggles, scope.calls, scope.env
        for number, node in enumerate(scope.program.index.nodes):
            if number in toggles or node in env or node.op == "output" or _is_body_only(node, calls):
                continue
            if node in calls:
                env[node] = self._write_body(node, calls[node], scope, number)
            elif _takes_item(node, env):
                env[node] = env[node.args[0]][node.args[1]]  # type: ignore[index]
            else:
                if node.op not in ("get_attr", "placeholder"):  # Both mean the same in every mode.
                    self.modes.switch(scope.mode_at(number))
                env[node] = self._copy(node, scope)

    def _copy(self, node: Node, scope: _Scope) -> Node:
        if not scope.calls_around:
            return self.writer.copy(node, scope.env.__getitem__, name=node.name)
        target = self._place(node, scope) if node.op in ("call_module", "get_attr") else None
        return self.writer.copy(node, scope.env.__getitem__, name=self.writer.names.fresh(node.name), target=target)

    def _write_body(self, node: Node, call: BodyCall, scope: _Scope, number: int) -> Any:
        """Writes the nodes of the body that `node` calls; returns its result."""
        inner = scope.program.body(call.body)
        inputs = bound_arguments(node, call.body.graph, call.operands, call.keywords)
        env = {placeholder: map_nodes(value, scope.env.__getitem__) for placeholder, value in inputs.items()}
        env.update(dict.fromkeys(inner.modes.read))
        output = inner.index.nodes[-1]
        calls = (*scope.calls_around, node)
        body = _Scope(
            inner,
            self.calls_in(inner),
            env,
            path=f"{scope.path}{call.path}.",
            around=_mode_inside(scope.mode_at(number), calls, call.sets),
            calls_around=calls,
        )
        self._write(body)
        return map_nodes(returned_value(node, output), env.__getitem__)

    def _place(self, node: Node, scope: _Scope) -> str:
        """A path for an attribute of the body: that before it moved, or else the current one."""
        body = scope.program.graph_module
        value = attribute_of(body, node)
        now = f"{scope.path}{node.target}"
        before = self.program.state_keys.original(now)
        known = self.placed.get(before, find(self.root, before))
        path = before if known is None or known is value or _is_rest_of(known, value) else now
        if path == now and node.op == "get_attr" and isinstance(value, GraphModule):
            path = self._place_at_the_top(str(node.target), value)
        self.placed[path] = value
        if not is_persistent(body, str(node.target)):
            self.non_persistent.add(path)
        return path

    def _place_at_the_top(self, name: str, body: GraphModule) -> str:
        """A path for the body of an operator: torch.export cannot save one that lies deeper."""
        base = path = name.replace(".", "_")
        count = 0
        while self.placed.get(path, getattr(self.root, path, body)) is not body:
            count += 1
            path = f"{base}_{count}"
        return path

    def _assembled(self) -> Program:
        graph = self.writer.close()
        self.modes.close()
        had_users = {node.name for node in self.program.index.nodes if node.users}
        for node in reversed(graph.nodes):
            if node.target in (SYM_SIZE, operator.getitem) and not node.users and node.name in had_users:
                graph.erase_node(node)
        module = module_like(self.root, graph, restores_modes=self.modes.has_switched)
        gone = {call.path for call in self.calls.values()}
        named = (str(node.target).split(".") for node in graph.nodes if node.op in ("call_module", "get_attr"))
        kept = {".".join(parts[:depth]) for parts in named for depth in range(1, len(parts) + 1)}
        share_state(self.root, module, without=frozenset(gone) - kept, room_for=self.placed)
        for path, value in self.placed.items():
            if find(module, path) is not value:
                place(module, path, value, persistent=path not in self.non_persistent)
        paths = (path for path, _ in module.named_modules(remove_duplicate=False) if path not in self.placed)
        return self.program.rewritten(module, state_keys=self.program.state_keys.of_paths(paths))


def _vanishes(node: Node, calls: Mapping[Node, BodyCall]) -> bool:
    source = node.args[0] if node.target is operator.getitem and node.args else None
    return node in calls or (isinstance(source, Node) and source in calls) or _is_body_only(node, calls)


def _is_body_only(node: Node, calls: Mapping[Node, BodyCall]) -> bool:
    """Whether `node` reads a body only for calls that are inlined."""
    users = [calls.get(user) for user in node.users] if node.op == "get_attr" else []
    return bool(users) and all(call is not None and call.read is node for call in users)


def _takes_item(node: Node, env: Mapping[Node, Any]) -> bool:
    """Whether `node` unpacks the tuple that an inlined body returned."""
    if node.target is not operator.getitem or len(node.args) != 2:
        return False
    source, item = node.args
    return isinstance(source, Node) and isinstance(item, int) and isinstance(env.get(source), tuple | list)


def _mode_inside(mode: Mode, calls: tuple[Node, ...], sets: Setting | None) -> Mode:
    """The mode of a body that the last of `calls` runs under a setting."""
    if sets is None:
        return mode
    return replace(mode, grad=sets.enabled) if isinstance(sets, Grad) else mode.inside(Block(calls, sets, mode.grad))


def _is_rest_of(container: Any, module: object) -> bool:
    """Whether a plain container holds only tensors of the module that has moved from its path."""
    if type(container) is not nn.Module or not isinstance(module, nn.Module) or container._modules:
        return False
    left = {**container._parameters, **container._buffers}
    return all(getattr(module, name, None) is tensor for name, tensor in left.items())


def _trees_of(call: Node, graph: Graph) -> Any:
    """The pytree specs by which a graph flattens arguments and unflattens results; None where it does not."""
    if not flattens_inputs(graph):
        return None
    convention = graph._codegen
    if hasattr(convention, "pytree_info"):
        return convention.pytree_info
    raise OptionError(
        f"the body of the call {call.name!r} has a calling convention of its own, {type(convention).__name__}; "
        "set it to torch.fx.graph.CodeGen"
    )


def _bound(
    call: Node, parameters: Sequence[tuple[str, tuple[Any, ...]]], operands: Sequence[Any], keywords: Mapping[str, Any]
) -> list[Any]:
    """A value for each parameter, which is a name and, in a tuple, a default."""
    values: list[Any] = []
    positional, named = deque(operands), dict(keywords)
    for name, default in parameters:
        if name.startswith("**"):
            values.append(named)
            named = {}
        elif name.startswith("*"):
            values.append(tuple(positional))
            positional.clear()
        elif positional:
            values.append(positional.popleft())
        elif name in named:
            values.append(named.pop(name))
        elif default:
            values.append(default[0])
        else:
            raise OptionError(f"the call {call.name!r} has no argument for {name!r}; pass one, or add a default")
    if positional or named:
        extra = ", ".join([*map(repr, positional), *(f"{name}={value!r}" for name, value in named.items())])
        raise OptionError(f"the call {call.name!r} has more arguments than its body takes: {extra}; remove them")
    return values


def _plain(value: Any) -> Any:
    """An argument with plain containers, as in pytrees, in place of fx's own."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _can_be_argument(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(map(_can_be_argument, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_can_be_argument, value))
    return value is None or isinstance(value, Node | bool | int | float | complex | str)
