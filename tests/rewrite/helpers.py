"""Functions with mode blocks, traced, wrapped, shown as trees, and run beside the plain function."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.helpers.core import program_of
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from partita import Program, plan
from partita._torch.modes import read_ambient, restore_autocast
from partita.analysis.modes import has_toggles
from partita.analysis.nodes import find
from partita.policies import ByMode
from partita.rewrite.mode_nodes import OperatorFamily, runs_body, setting_of
from partita.treatments import Mode

HALF, BRAIN = torch.float16, torch.bfloat16
Function = Callable[..., Any]


def traced(function: Function, *args: Any, symbolic: bool = False) -> Program:
    """The program of a function, its mode blocks as toggles."""
    mode = "symbolic" if symbolic else "real"
    return Program.of(make_fx(function, pre_dispatch=True, tracing_mode=mode)(*args))


def wrapped(program: Program, operators: OperatorFamily = "partita") -> Program:
    """The program with its modes as operators."""
    return plan(program, ByMode(), Mode(operators)).apply()


def calling(body: nn.Module, call: Callable[[Graph, Any], Any], **modules: nn.Module) -> Program:
    """A program that calls `body` under the name `sub`."""
    root = nn.Module()
    root.sub = body
    for name, module in modules.items():
        root.add_module(name, module)
    graph = Graph()
    graph.output(call(graph, graph.placeholder("x")))
    return program_of(graph, root)


def call_sub(graph: Graph, x: Any) -> Any:
    return graph.call_module("sub", (x,))


def program_of_toggles(write: Callable[[Graph, Node], Any], root: nn.Module | None = None) -> Program:
    """The program of a graph with one input, that `write` fills; what it gives is returned."""
    graph = Graph()
    graph.output(write(graph, graph.placeholder("x")))
    return Program.of(GraphModule(root or nn.Module(), graph))


def tree(source: Program | GraphModule) -> str:
    """What a program runs, one line a node, bodies of operators indented under what they set."""
    module = source.graph_module if isinstance(source, Program) else source
    return "\n".join(_lines(module, ""))


def has_toggles_anywhere(module: GraphModule) -> bool:
    """Whether a graph, or a body that it calls, switches a mode by toggles."""
    bodies = (child for child in module.modules() if isinstance(child, GraphModule))
    return any(has_toggles(body.graph) for body in bodies)


def outcome(function: Function, *args: Any) -> list[Any]:
    """All observable results of a call and its backward: values, `requires_grad`, gradients, mutated inputs."""
    own = [_own(value) for value in args]
    found = read_ambient()
    torch.manual_seed(3)
    returned = tree_leaves(function(*own))
    torch.set_grad_enabled(found.grad)
    restore_autocast(found)
    tensors = [value for value in returned if isinstance(value, Tensor)]
    # Where to go back from: each once, or what is added up depends on how often a value is returned.
    losses = [value.float().square().sum() for value in dict.fromkeys(tensors) if value.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    seen = [*returned, *(value.requires_grad for value in tensors), *(value.is_inference() for value in tensors)]
    return [*seen, *(leaf.grad for leaf in own if isinstance(leaf, Tensor)), *own]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Bit by bit, dtypes included."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert type(ours) is type(theirs)
        if isinstance(ours, Tensor):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        else:
            assert ours == theirs


def assert_like_eager(function: Function, *args: Any, operators: OperatorFamily = "partita") -> Program:
    """The wrapped program of a function, which is equivalent to it and has no toggle left."""
    program = wrapped(traced(function, *map(_own, args)), operators)
    assert not has_toggles_anywhere(program.graph_module)
    assert_same(outcome(program.module(), *args), outcome(function, *args))
    return program


def square() -> Tensor:
    """A matrix that requires gradients."""
    return torch.linspace(-1, 1, 9).reshape(3, 3).requires_grad_()


def _own(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _lines(module: GraphModule, indent: str) -> Iterator[str]:
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node.target is operator.getitem:
            continue
        setting, place = setting_of(node), runs_body(node)
        yield f"{indent}{node.name if setting is None else setting}"
        bodies = [node.args[place]] if place is not None else node.all_input_nodes
        for body in (find(module, str(read.target)) for read in bodies if read.op == "get_attr"):
            if isinstance(body, GraphModule):
                yield from _lines(body, f"{indent}    ")
