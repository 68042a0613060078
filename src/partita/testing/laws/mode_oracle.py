"""Reference interpreter for modes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from partita._torch.modes import Ambient, read_ambient, restore_autocast
from partita._torch.pytrees import flatten
from partita._torch.toggles import ENTER_INFERENCE, IS_GRAD_ENABLED, SET_GRAD, TOGGLES
from partita.analysis.mode import Mode as GraphMode
from partita.equivalence import compare
from partita.plans import plan
from partita.policies import ByMode
from partita.program.program import Program
from partita.testing.generator.draft import Case
from partita.treatments import Mode

__all__ = [
    "ModeSubject",
    "Sight",
    "bodies_of",
    "bodies_of_call",
    "equal",
    "graphs_in",
    "leaves_modes",
    "means_the_same",
    "modes_seen",
    "putting_back",
    "text_of",
    "wrapped",
]


# What the laws for modes are about: a program, its wrapped form, and one that puts its modes back.


@final
@dataclass(frozen=True)
class ModeSubject:
    """A case, its program, and the program with operators for all modes."""

    case: Case
    program: Program
    wrapped: Program

    @cached_property
    def calm(self) -> Program:
        """The program, putting back the modes that it would leave behind, as its wrapped form does."""
        return putting_back(self.case, self.wrapped.caller) if leaves_modes(self.case) else self.program

    @cached_property
    def names(self) -> frozenset[str]:
        """The nodes of the program, those in bodies too."""
        return frozenset(names_in(self.program.graph_module))

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
    """Raises where calls tell the two apart; one call will do unless `thoroughly`."""
    comparison = compare(
        subject.calm, after, subject.case.args, subject.case.kwargs,
        second_call=thoroughly, no_grad_call=thoroughly, other_shapes=thoroughly,
    )  # fmt: skip
    assert comparison.equal, str(comparison)


def equal(found: object, wanted: object) -> None:
    """Raises unless the two are equal."""
    assert found == wanted, f"{found} is not {wanted}"


# An oracle for modes: graphs run node by node, toggles and all, with the modes that each operator finds written down.
#
# It knows nothing of how Partita tells modes from a graph. Nodes are told by name; inside the body of an operator, by
# the path of calls that lead there. Operators that wrapping has put around nodes are no part of that path, so a
# program and its wrapped form can be compared node by node.


@dataclass(frozen=True, slots=True)
class Sight:
    """What a run showed: the modes that each operator found, and what came of it."""

    modes: dict[str, Ambient] = field(default_factory=dict)
    outputs: tuple[object, ...] = ()
    state: tuple[object, ...] = ()
    raised: type[Exception] | None = None
    #: Whether the run left other modes behind than it found.
    leaks: bool = False


def modes_seen(case: Case, module: GraphModule, *, known: Collection[str] | None = None) -> Sight:
    """Runs `module` on the arguments of `case`, in the modes around; `known` are the nodes of the program it came from.

    Both the module and the arguments may be written, and the modes are put back.
    """
    run = _Run({}, known)
    found, grad = read_ambient(), torch.is_grad_enabled()
    torch.default_generator.manual_seed(0)
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
    # Wrapping moves modules, or has them in two places, so state is told by its values alone.
    once = {id(value): value for value in state}.values()
    shown = (*sorted(repr(_shown(value)) for value in once), torch.get_rng_state().numpy().tobytes())
    return Sight(run.modes, outputs, shown, raised, leaks=raised is None and left != found)


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
    """What is the same for all bodies of one run, and the path of calls that leads to the one that runs."""

    modes: dict[str, Ambient]
    known: Collection[str] | None
    path: str = ""

    def is_known(self, node: Node) -> bool:
        return self.known is None or f"{self.path}{node.name}" in self.known

    def inside(self, call: Node, place: int) -> _Run:
        """The run of a body that `call` is given at that place among its arguments."""
        return replace(self, path=f"{self.path}{call.name}/{place}/") if self.is_known(call) else self


@dataclass(frozen=True, slots=True)
class _Body:
    """A graph that an operator will run; which one tells only the call."""

    module: GraphModule


def _interpreted(module: GraphModule, run: _Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    graph = module.graph
    given = _Given(list(graph.process_inputs(*args)) if args else [], dict(kwargs))
    env: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            return graph.process_outputs(map_arg(node.args[0], env.__getitem__))
        value = given.value_for(node) if node.op == "placeholder" else _value(module, run, node, env)
        # The handle of a block that nobody leaves is dropped at once, and the block with it.
        env[node] = None if node.target is ENTER_INFERENCE and not node.users else value
        del value
    raise AssertionError("a graph without an output")


@dataclass(slots=True)
class _Given:
    """The arguments that no placeholder has taken yet."""

    positional: list[Any]
    named: dict[str, Any]

    def value_for(self, placeholder: Node) -> Any:
        target = str(placeholder.target)
        if target.startswith("**"):
            taken, self.named = self.named, {}
            return taken
        if target.startswith("*"):
            rest, self.positional = tuple(self.positional), []
            return rest
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
    target: Any = module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    return target(*args, **kwargs)


def _callable(value: Any, run: _Run, call: Node, place: int) -> Any:
    """A body in the place of which the operator calls this oracle."""
    if not isinstance(value, _Body):
        return value
    inside: Callable[..., Any] = lambda *args, **kwargs: _interpreted(  # noqa: E731
        value.module, run.inside(call, place), args, kwargs
    )
    return inside


def _is_operator(node: Node, args: tuple[Any, ...]) -> bool:
    """Whether the modes matter to a node; taking an item or a size and asking for a mode to put back run anywhere."""
    if node.target is IS_GRAD_ENABLED:
        return any(user.target is not SET_GRAD for user in node.users)
    takes_item = node.target in (operator.getitem, getattr) and not (args and isinstance(args[0], Tensor))
    return node.target not in TOGGLES and not takes_item


def _shown(leaf: object) -> object:
    """A leaf in a form that can be compared; every NaN is alike."""
    if not isinstance(leaf, Tensor):
        return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)
    flags = (leaf.dtype, tuple(leaf.shape), leaf.requires_grad, leaf.is_inference())
    return (*flags, repr(leaf.detach().tolist()))


# Graphs in graphs: a program's own, and those of the bodies that its operators run, at any depth.


def graphs_in(module: GraphModule) -> Iterator[Graph]:
    """The graph of `module`, and those of all bodies in it."""
    yield module.graph
    for body in bodies_of(module):
        yield from graphs_in(body)


def bodies_of(module: GraphModule) -> Iterator[GraphModule]:
    """The bodies that the operators of a graph run, one for each time that it is read."""
    for node in module.graph.find_nodes(op="get_attr"):
        if not node.users:
            continue
        body = attrgetter(str(node.target))(module)
        if isinstance(body, GraphModule):
            yield body


def bodies_of_call(module: GraphModule, call: Node) -> Iterator[tuple[int, GraphModule]]:
    """The bodies that one call is given, each with its place among the arguments."""
    for place, value in enumerate(call.args):
        if isinstance(value, Node) and value.op == "get_attr":
            body = attrgetter(str(value.target))(module)
            if isinstance(body, GraphModule):
                yield place, body


def names_in(module: GraphModule, path: str = "") -> Iterator[str]:
    """The names of all nodes; of those in bodies, after the calls that lead there."""
    for node in module.graph.nodes:
        yield f"{path}{node.name}"
        for place, body in bodies_of_call(module, node):
            yield from names_in(body, f"{path}{node.name}/{place}/")


def text_of(module: GraphModule) -> str:
    """All graphs as text."""
    return "\n".join(map(str, graphs_in(module)))


# Programs that put back the modes that they found, made from programs that leave some switched.


def putting_back(case: Case, caller: GraphMode) -> Program:
    """The program of `case` with two nodes more: it asks for all modes first and restores them in the end."""
    graph = Graph()
    returned = graph.graph_copy(case.graph_module.graph, {})
    graph.output(returned)
    graph.set_codegen(case.graph_module.graph._codegen)
    module = GraphModule(case.graph_module, graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        found = graph.call_function(found_modes)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(put_back, (found,))
    module.recompile()
    return Program(module, pure=(found_modes, put_back), caller=caller)


def found_modes() -> Ambient:
    """The modes now."""
    return read_ambient()


def put_back(found: Ambient) -> None:
    """Sets them again."""
    torch.set_grad_enabled(found.grad)
    restore_autocast(found)
