"""Calls of modules in an exported program: it can hold none, so it becomes the module that it stands for."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.export_hooks import drop_fleeting_hooks
from partita._torch.input_guards import check_inputs
from partita.graphs.program import Program
from partita.rewrite.assembly import module_like
from partita.rewrite.state import share_state

__all__ = ["calling_modules"]


def calling_modules(program: Program, modules: Mapping[str, nn.Module]) -> Program:
    """The module of an exported program, with calls of these modules where it runs bodies, by the name of the call.

    It is a module of ours, so that it can be pickled, which torch's own cannot. It checks its inputs against the sizes,
    ranges and conditions that were exported, and so does a pickled one.
    """
    exported = program.exported()
    unlifted = exported.module(check_guards=False)
    assert isinstance(unlifted, GraphModule)
    drop_fleeting_hooks(unlifted)
    check_inputs(unlifted, exported)
    graph, replaced = unlifted.graph, dict[str, nn.Module]()
    for node in list(graph.nodes):
        if node.name in modules:
            body, *operands = node.args
            assert isinstance(body, Node)
            replaced[str(body.target)] = modules[node.name]
            node.op, node.target, node.args = "call_module", body.target, tuple(operands)
            graph.erase_node(body)
    module = module_like(unlifted, graph)
    share_state(unlifted, module, without=frozenset(replaced))
    for name, called in replaced.items():
        module.add_module(name, called)
    return Program(
        module,
        pure=program.pure,
        state_keys=program.state_keys,
        tolerance=program.tolerance,
        caller=program.caller,
    )
