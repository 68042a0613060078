"""Calls of a body: through an operator, as exported programs and modes need it, or as a module."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

import partita.hops as hops
from partita._torch.fx.lazy_graph_module import TRAINING, exempt_from_dce
from partita._torch.nn_modules import drop_fleeting_hooks
from partita.analysis.nodes import common_stack, outermost_stack
from partita.program._torch.guards import callers_take_guards, check_inputs
from partita.program.program import Program
from partita.rewrite.state import module_like, share_state


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator that runs a body, and the arguments that it takes before the body."""

    operator: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


PLAIN_CALL = OperatorCall(hops.call)


def call_through(
    module: GraphModule,
    calls: Mapping[str, OperatorCall],
    *,
    openers: Mapping[str, Node | None] | None = None,
    origins: Mapping[str, Sequence[Node]] | None = None,
    named_by_operator: bool = False,
) -> None:
    """Turns calls of submodules, by attribute name, into calls of operators, in a new graph.

    The call keeps its name, and the read of the body is named after it; with `named_by_operator`, as in torch, the call
    is named after its operator. The module stack of a call is common to its body and its toggle in `openers`; of a call
    in `origins`, whose body is another region's, to these nodes.
    """
    graph, openers, origins = module.graph, openers or {}, origins or {}
    outermost = outermost_stack(graph)
    for node in graph.find_nodes(op="call_module"):
        call = calls.get(str(node.target))
        if call is None:
            continue
        name = getattr(call.operator, "__name__", str(call.operator))
        reading = str(node.target) if named_by_operator else f"{node.name}_body"
        with graph.inserting_before(node):
            body = graph.create_node("get_attr", str(node.target), name=reading)
        if named_by_operator:
            node._rename(name)
        inside = module.get_submodule(str(node.target))
        opener = openers.get(str(node.target))
        held = [] if opener is None else [opener]
        if isinstance(inside, GraphModule):
            exempt_from_dce(inside.graph)
            held += origins.get(str(node.target)) or [
                inner for inner in inside.graph.nodes if inner.op != "placeholder"
            ]
        stack = common_stack(held) or outermost
        body.meta["nn_module_stack"] = dict(stack)
        node.op, node.target = "call_function", call.operator
        node.args = (*call.arguments, body, *node.args)
        node.meta.update(nn_module_stack=dict(stack), torch_fn=(name, f"{type(call.operator).__name__}.{name}"))


def calling_modules(program: Program, modules: Mapping[str, nn.Module]) -> Program:
    """The module of an exported program, with calls of these modules where it runs bodies, by the name of the call.

    An exported program cannot call modules. The result can be pickled, which torch's own module cannot. It checks its
    inputs against the sizes, ranges and conditions that were exported, also once it is unpickled.
    """
    exported = program.exported()
    unlifted = exported.module(check_guards=False)
    assert isinstance(unlifted, GraphModule)
    drop_fleeting_hooks(unlifted)
    if callers_take_guards():
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
    flag = program.graph_module.meta.get(TRAINING, "exported with flags that are not known")
    if isinstance(flag, bool):
        module.train(flag)
    module.meta[TRAINING] = flag
    share_state(unlifted, module, without=frozenset(replaced))
    for name, called in replaced.items():
        module.add_module(name, called)
    _name_shared_bodies(module, program)
    return Program(
        module, pure=program.pure, state_keys=program.state_keys, tolerance=program.tolerance, caller=program.caller
    )


def _name_shared_bodies(module: GraphModule, program: Program) -> None:
    """Sets each body also at the other names that it has in the program: exported programs have one for each body."""
    targets = {node.name: str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    for node in program.graph.find_nodes(op="get_attr"):
        found = module._modules.get(targets.get(node.name, ""))
        if isinstance(found, GraphModule) and not hasattr(module, str(node.target)):
            module._modules[str(node.target)] = found


def only_call(module: GraphModule) -> tuple[GraphModule, OperatorCall] | None:
    """The body and the call of it, if a module only runs one body on its inputs and returns its results."""
    calls = [node for node in module.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    call = calls[0] if calls else None
    if call is None or any(node.target is not operator.getitem for node in calls[1:]):
        return None
    bodies = [at for at, value in enumerate(call.args) if isinstance(value, Node) and value.op == "get_attr"]
    if len(bodies) != 1 or call.kwargs or call.op != "call_function":
        return None
    operands = call.args[bodies[0] + 1 :]
    (output,) = module.graph.find_nodes(op="output")
    results = output.args[0]
    if list(operands) != module.graph.find_nodes(op="placeholder") or not isinstance(results, tuple):
        return None
    unpacked = [(call, at) for at in range(len(results))]
    if [value.args if isinstance(value, Node) else None for value in results] != unpacked:
        return None
    body = module.get_submodule(str(call.args[bodies[0]].target))
    return (body, OperatorCall(call.target, call.args[: bodies[0]])) if isinstance(body, GraphModule) else None


def owned_inputs(program: Program) -> dict[Node, Tensor]:
    """The inputs of an exported program that are its parameters, buffers and constants, with their tensors."""
    if program.export is None:
        return {}
    held = {**program.export.constants, **program.export.state}
    specs = {spec.arg.name: spec.target for spec in program.export.signature.input_specs if spec.target is not None}
    inputs = program.graph.find_nodes(op="placeholder")
    owned = ((node, held.get(specs.get(node.name, ""))) for node in inputs)
    return {node: tensor for node, tensor in owned if isinstance(tensor, Tensor)}
