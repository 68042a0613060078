"""A reference interpreter for modes: runs graphs node by node and records the modes that each operator finds.

It does not use the mode analysis of Partita. Nodes are identified by name; inside the body of an operator, by the path
of calls that leads there. Operators that wrapping has added are no part of that path, so a program and its wrapped form
can be compared node by node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from partita._torch.modes import Ambient, read_ambient, restore_autocast
from partita._torch.pytrees import flatten
from partita._torch.toggles import ENTER_INFERENCE, IS_GRAD_ENABLED, SET_GRAD, TOGGLES
from partita.analysis.modes import Mode as GraphMode
from partita.analysis.nodes import bodies_read, body_read
from partita.plans import plan
from partita.policies import ByMode
from partita.program.program import Program
from partita.testing.generator.draft import Case
from partita.testing.laws.core import ONE_CALL, check_equivalent
from partita.treatments import Mode


@final
@dataclass(frozen=True)
class ModeSubject:
    """A case, its program, and the program with operators for all modes."""

    case: Case
    program: Program
    wrapped: Program

    @cached_property
    def restoring(self) -> Program:
        """The program, restoring the modes that it would leave behind, as its wrapped form does."""
        return restoring_modes(self.case, self.wrapped.caller) if leaves_modes(self.case) else self.program

    @cached_property
    def names(self) -> frozenset[str]:
        """The nodes of the program, those in bodies too."""
        return frozenset(_names_in(self.program.graph_module))

    @cached_property
    def has_inference(self) -> bool:
        """Whether inference mode is switched anywhere, on or off."""
        graphs = graphs_in(self.program.graph_module)
        return any("inference" in str(node.target) for graph in graphs for node in graph.nodes)


def wrapped(program: Program, *, under: AbstractContextManager[Any] | None = None) -> Program:
    """The program with operators for all modes, made in the modes of `under`."""
    with under or torch.enable_grad():
        return plan(program, ByMode(), Mode()).apply()


def means_the_same(subject: ModeSubject, after: Program, *, thoroughly: bool = False) -> None:
    """Raises where a comparison finds a difference; of one call unless `thoroughly`."""
    check_equivalent(subject.restoring, after, subject.case, **({} if thoroughly else ONE_CALL))


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """The modes that each operator found in a run, and its results."""

    modes: dict[str, Ambient] = field(default_factory=dict)
    outputs: tuple[object, ...] = ()
    state: tuple[object, ...] = ()
    raised: type[Exception] | None = None
    #: Whether the run left other modes behind than it found.
    leaks: bool = False


def modes_seen(case: Case, module: GraphModule, *, known: Collection[str] | None = None) -> ObservedRun:
    """Runs `module` on the arguments of `case`, in the modes around; `known` are the nodes of the program it came from.

    Both the module and the arguments may be mutated; the modes are restored.
    """
    run = _Run({}, known)
    found, grad = read_ambient(), torch.is_grad_enabled()
    torch.manual_seed(0)
    torch.clear_autocast_cache()
    raised, returned = None, None
    with torch.inference_mode(found.inference), torch.set_grad_enabled(grad):
        try:
            returned = _interpreted(module, run, case.args, case.kwargs)
        except Exception as error:
            raised = type(error)
        left = read_ambient()
        outputs = tuple(map(_shown, flatten(returned).leaves))
    restore_autocast(found)
    state = (*module.state_dict(keep_vars=True).values(), *flatten((case.args, case.kwargs)).leaves)
    # Wrapping moves or duplicates modules, so state is compared by its values alone.
    once = {id(value): value for value in state}.values()
    shown = (*sorted(repr(_shown(value)) for value in once), *_rng_states())
    return ObservedRun(run.modes, outputs, shown, raised, leaks=raised is None and left != found)


def _rng_states() -> list[bytes]:
    """The states of torch's own generators."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return [state.numpy().tobytes() for state in states]


def leaves_modes(case: Case) -> bool:
    """Whether a caller, with or without gradients, may find other modes afterwards; an exception can leave any."""
    for caller in (torch.enable_grad(), torch.no_grad()):
        own = case.copy()
        with caller:
            sight = modes_seen(own, own.graph_module)
        if sight.leaks or sight.raised:
            return True
    return False


@dataclass(frozen=True, slots=True)
class _Run:
    """The record of a run, shared by all bodies, and the path of calls that leads to the current one."""

    modes: dict[str, Ambient]
    known: Collection[str] | None
    path: str = ""

    def is_known(self, node: Node) -> bool:
        return self.known is None or f"{self.path}{node.name}" in self.known

    def inside(self, call: Node, place: int) -> _Run:
        """The run of a body that is an argument of `call`, at this place."""
        return replace(self, path=f"{self.path}{call.name}/{place}/") if self.is_known(call) else self


@dataclass(frozen=True, slots=True)
class _Body:
    """A graph that an operator will run."""

    module: GraphModule


def _interpreted(module: GraphModule, run: _Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    graph = module.graph
    arguments = _Arguments(list(graph.process_inputs(*args)) if args else [], dict(kwargs))
    env: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            return graph.process_outputs(map_arg(node.args[0], env.__getitem__))
        value = arguments.value_for(node) if node.op == "placeholder" else _value(module, run, node, env)
        # An unused handle is dropped at once, which ends the block.
        env[node] = None if node.target is ENTER_INFERENCE and not node.users else value
        del value
    raise AssertionError("a graph without an output")


@dataclass(slots=True)
class _Arguments:
    """The arguments that no placeholder has consumed yet."""

    positional: list[Any]
    named: dict[str, Any]

    def value_for(self, placeholder: Node) -> Any:
        target = str(placeholder.target)
        if target.startswith("**"):
            rest, self.named = self.named, {}
            return rest
        if target.startswith("*"):
            positional, self.positional = tuple(self.positional), []
            return positional
        if self.positional:
            return self.positional.pop(0)
        return self.named.pop(target) if target in self.named else placeholder.args[0]


def _value(module: GraphModule, run: _Run, node: Node, env: Mapping[Node, Any]) -> Any:
    if node.op == "get_attr":
        value = attrgetter(str(node.target))(module)
        return _Body(value) if isinstance(value, GraphModule) else value
    args = tuple(_callable(value, run, node, at) for at, value in enumerate(map_arg(node.args, env.__getitem__)))
    kwargs = map_arg(node.kwargs, env.__getitem__)
    if _is_operator(node, args):
        run.modes[f"{run.path}{node.name}"] = read_ambient()
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op != "call_module":
        return cast("Callable[..., Any]", node.target)(*args, **kwargs)
    called = module.get_submodule(str(node.target))
    # Around an operator whose region gives more than tensors and sizes, wrapping writes a module.
    if isinstance(called, GraphModule) and not run.is_known(node):
        return _interpreted(called, run, args, kwargs)
    return called(*args, **kwargs)


def _callable(value: Any, run: _Run, call: Node, place: int) -> Any:
    """The value; a body is replaced by a function that interprets it."""
    if not isinstance(value, _Body):
        return value
    inside: Callable[..., Any] = lambda *args, **kwargs: _interpreted(  # noqa: E731
        value.module, run.inside(call, place), args, kwargs
    )
    return inside


def _is_operator(node: Node, args: tuple[Any, ...]) -> bool:
    """Whether modes matter to a node; items, numbers and queries of a restored mode are the same in any mode."""
    if node.target is IS_GRAD_ENABLED:
        return any(user.target is not SET_GRAD for user in node.users)
    is_of_python = node.target is getattr or getattr(node.target, "__module__", "") == operator.eq.__module__
    is_plain = is_of_python and not any(isinstance(arg, Tensor) for arg in args)
    return node.target not in TOGGLES and not is_plain


def _shown(leaf: object) -> object:
    """A leaf in a form that can be compared; all NaNs are equal."""
    if not isinstance(leaf, Tensor):
        return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)
    flags = (leaf.dtype, tuple(leaf.shape), leaf.requires_grad, leaf.is_inference())
    return (*flags, repr(leaf.detach().tolist()))


def graphs_in(module: GraphModule) -> Iterator[Graph]:
    """The graph of `module`, and those of all bodies in it."""
    yield module.graph
    for body in bodies_of(module):
        yield from graphs_in(body)


def bodies_of(module: GraphModule) -> Iterator[GraphModule]:
    """The bodies that the operators of a graph run, one for each node that reads it."""
    reads = (node for node in module.graph.find_nodes(op="get_attr") if node.users)
    return (body for _, body in bodies_read(module, reads))


def bodies_of_call(module: GraphModule, call: Node) -> Iterator[tuple[int, GraphModule]]:
    """The bodies among the arguments of a call, each with its place."""
    for place, value in enumerate(call.args):
        if isinstance(value, Node) and (body := body_read(module, value)) is not None:
            yield place, body


def _names_in(module: GraphModule, path: str = "") -> Iterator[str]:
    """The names of all nodes; those in bodies are prefixed by the path of calls."""
    for node in module.graph.nodes:
        yield f"{path}{node.name}"
        for place, body in bodies_of_call(module, node):
            yield from _names_in(body, f"{path}{node.name}/{place}/")


def text_of(module: GraphModule) -> str:
    """All graphs as text."""
    return "\n".join(map(str, graphs_in(module)))


def restoring_modes(case: Case, caller: GraphMode) -> Program:
    """The program of `case` with two more nodes: it queries all modes first and restores them in the end."""
    graph = Graph()
    returned = graph.graph_copy(case.graph_module.graph, {})
    graph.output(returned)
    graph.set_codegen(case.graph_module.graph._codegen)
    module = GraphModule(case.graph_module, graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        found = graph.call_function(read_ambient)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(_restore, (found,))
    module.recompile()
    return Program(module, pure=(read_ambient, _restore), caller=caller)


def _restore(found: Ambient) -> None:
    torch.set_grad_enabled(found.grad)
    restore_autocast(found)
