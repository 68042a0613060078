"""Small programs, and their graphs as text, for the tests of the core."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from textwrap import dedent
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Tracer

from partita import Program, plan
from partita.policies import ByLabel
from partita.rewrite.state import StateNaming
from partita.treatments import Call


def program_of(source: nn.Module | Callable[..., Any] | Graph, root: nn.Module | None = None) -> Program:
    """A program from a module, a function, or a graph over `root`."""
    if isinstance(source, Graph):
        return Program.of(GraphModule(root or nn.Module(), source))
    tracer = Tracer()
    graph = tracer.trace(source)
    return Program.of(_with_fleeting_buffers(GraphModule(tracer.root, graph), tracer.root))


def _with_fleeting_buffers(module: GraphModule, root: nn.Module) -> GraphModule:
    """`module` with the buffers of `root` as they are saved there, which torch 2.13 forgets."""
    saved = root.state_dict()
    for name, buffer in list(module.named_buffers(remove_duplicate=False)):
        if name not in saved:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner).register_buffer(leaf, buffer, persistent=False)
    return module


def cut(program: Program, labels: Mapping[str, Hashable], *, state_names: StateNaming = "split") -> Program:
    """`program` with the named nodes in regions of these names, each called."""
    return plan(program, ByLabel(lambda node: labels.get(node.name)), Call()).apply(state_names=state_names)


def listing(owner: Program | GraphModule | Graph) -> str:
    """A graph as text, one line a node."""
    graph = owner if isinstance(owner, Graph) else owner.graph
    return "\n".join(map(_line, graph.nodes))


def text(block: str) -> str:
    """A block of expected text as it stands in a test, without its indentation."""
    return dedent(block).strip()


def _line(node: Any) -> str:
    target = node.target if isinstance(node.target, str) else node.target.__name__
    named = [f"{key}={value}" for key, value in node.kwargs.items()]
    arguments = ", ".join([*map(str, node.args), *named])
    if node.op == "placeholder":
        return f"{node.name}: input{f' = {arguments}' if arguments else ''}"
    if node.op == "output":
        return f"return {arguments}"
    shown = {"call_module": f"self.{target}", "call_method": f".{target}", "get_attr": f"self.{target}"}
    call = shown.get(node.op, target)
    return f"{node.name} = {call}" + ("" if node.op == "get_attr" else f"({arguments})")
