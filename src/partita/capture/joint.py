"""Capturing a model together with its backward: one graph from parameters and arguments to results and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.fx import GraphModule

from partita._torch.modes import fresh_modes
from partita.capture._torch.joint import (
    Arguments,
    TracedJoint,
    copy_outputs,
    join_tied_state,
    register_constants,
    trace_joint,
)
from partita.capture.capture import capture, check_options, summary_of
from partita.capture.function_module import FunctionModule, name_of
from partita.errors import CaptureError
from partita.program.program import Program


def capture_joint(
    model: nn.Module | Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Program:
    """The joint graph of a model and its backward for these arguments, with what `capture` keeps kept.

    It takes the parameters and buffers that `joint.state` names, then all leaves of `args` and `kwargs`, then a tangent
    for each output of the forward that has a gradient. It returns the new values of what the model mutates, all leaves
    of its result, and a gradient or None for every input. It mutates nothing itself, and computes gradients whether or
    not gradients are on: call it under `torch.no_grad()`. A parameter with several names is one input, under its first
    name. A result that shares memory with something else is copied, so that its gradient has an input of its own.
    """
    check_options(model, args, kwargs)
    owner = model if isinstance(model, nn.Module) else FunctionModule(model)
    with fresh_modes(grad=True):
        arguments = Arguments(owner, args, kwargs or {})
    module = capture(owner, arguments.args, arguments.kwargs).module()
    try:
        traced = _traced(module, arguments)
        _check(traced, arguments)
    except CaptureError as error:
        raise CaptureError(f"{name_of(model)} has no joint graph: {error}") from error
    except Exception as error:
        raise CaptureError(f"{name_of(model)} has no joint graph: {summary_of(error)}") from error
    return Program.of(traced.graph_module, forward_outputs=traced.forward_outputs)


def _traced(module: GraphModule, arguments: Arguments) -> TracedJoint:
    join_tied_state(module)
    constants = register_constants(module)
    traced = trace_joint(module, arguments.args, arguments.kwargs, constants)
    if not traced.aliased_outputs:
        return traced
    copy_outputs(module, traced.aliased_outputs)
    return trace_joint(module, arguments.args, arguments.kwargs, constants)


def _check(traced: TracedJoint, arguments: Arguments) -> None:
    if traced.mutated_constants:
        raise CaptureError(
            f"it mutates {traced.mutated_constants[0]!r}, which is neither an argument nor in its state, so the new "
            "value would be lost; register it as a buffer"
        )
    if traced.merges_inputs or (traced.mutates_inputs and arguments.has_copies):
        raise CaptureError(
            "it mutates an input while inputs share memory, and no graph has an input for each of these; pass "
            "arguments that share no memory with one another or with its state"
        )
    inputs = traced.graph_module.graph.find_nodes(op="placeholder")
    if not any(str(node.target).startswith("tangents") for node in inputs):
        raise CaptureError(
            "none of its results depends on anything that requires gradients; give it parameters or arguments that do"
        )
