"""Captures a model as a program, alone or joint with its backward: operators in grad, inference and autocast blocks.

A query for the modes of the caller returns a plain True or False in a trace. So a model that makes one is traced again
with another answer, and the difference shows what depends on the caller: gradients that are off only in the second
trace, or blocks that switch autocast off only if it was on.
"""

from __future__ import annotations

import dis
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType
from typing import Any, final

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from partita._torch.fx.graph_writer import attributes_of_graph_modules
from partita._torch.fx.lazy_graph_module import TRAINING
from partita._torch.modes import fresh_modes
from partita._torch.pytrees import leaves_of, tensors_in
from partita.capture._torch.caller_modes import GradSwitch
from partita.capture._torch.joint import (
    Arguments,
    TracedJoint,
    copy_outputs,
    join_tied_state,
    register_constants,
    trace_joint,
)
from partita.capture._torch.patching import CHECKPOINT
from partita.capture._torch.recorded_export import export_recorded, read_generators_from_inputs
from partita.capture._torch.recorder import is_only_traced
from partita.capture.trace_check import StopAfterTrace, TraceOnlyPass, WrapModesPass
from partita.errors import CaptureError, OptionError, PartitaError
from partita.program.program import Program
from partita.rewrite.inline import inline

_LOG = logging.getLogger(__name__)


def capture(
    model: nn.Module | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Program:
    """The program that a model runs for these arguments; `args`, `kwargs`, `dynamic_shapes` are as for torch.export.

    Example::

        rows = torch.export.Dim("rows", min=2, max=64)
        program = partita.capture(model, (x,), dynamic_shapes=({0: rows},))
        y = program.module()(torch.randn(7, 8))

    The modes that `capture` is called under make no difference. Blocks of the model are kept as they were written, and
    outside of them the program follows the modes of its caller; it leaves no mode switched behind. A model that queries
    the modes of its caller is traced again with another answer. If it only restores or disables them, the program does
    so too; if it computes something else, a warning is logged, and the program is what it does with gradients on and
    autocast off. A query for inference mode always reports that the caller is not in it. A checkpointed call becomes a
    plain call, and a warning is logged: what to recompute is decided by a treatment. Values and gradients are the same,
    unless torch's checkpoint itself differs from a plain call: if its body mutates buffers, if random operators run
    with `preserve_rng_state=False`, or if no input requires a gradient with `use_reentrant=True`. The nodes of the call
    are annotated, for `ByAnnotation("checkpoint")`.
    """
    check_options(model, args, kwargs)
    try:
        module = model if isinstance(model, nn.Module) else FunctionModule(model)
        _check_arguments((args, kwargs))
        _check_not_sharded(module, (args, kwargs))
        with fresh_modes(grad=True):
            given = Arguments(module, args, kwargs or {})
        call = ModelCall(module, given.args, None if kwargs is None else given.kwargs, dynamic_shapes)
        exported = call.exported()
        read_generators_from_inputs(exported)
        if given.has_copies:
            call.warn_if_it_differs_from(replace(call, args=args, kwargs=kwargs))
    except CaptureError as error:
        raise CaptureError(f"{name_of(model)} cannot be captured: {error}") from error
    except PartitaError as error:
        error.add_note(f"This happened while {name_of(model)} was captured.")
        raise
    except Exception as error:
        raise CaptureError(f"{name_of(model)} cannot be captured: {_reason(error)}") from error
    _check_state(exported, name_of(model))
    # Torch's verifier accepts no toggles, so the export has operators for the blocks; a captured program has toggles.
    exported.graph_module.meta[TRAINING] = _training_flag(module)
    program = inline(Program.of(exported))
    _warn_of_checkpoints(program, name_of(model))
    return program


def _check_arguments(arguments: Any) -> None:
    """Raises for modules: torch.export takes them, but the program that comes of it takes no other one."""
    module = next((leaf for leaf in leaves_of(arguments) if isinstance(leaf, nn.Module)), None)
    if module is not None:
        raise CaptureError(
            f"one of its arguments is a module, {type(module).__name__}; make it an attribute of the model, or capture "
            "a module that has both as attributes"
        )


def _check_state(exported: ExportedProgram, model: str) -> None:
    """Raises for tensors that exist in the trace alone, and for names of which the module of the program has others."""
    if is_only_traced((*exported.constants.values(), *exported.state_dict.values())):
        raise CaptureError(f"{model} cannot be captured: {_gradient_transform_reason()}")
    taken = attributes_of_graph_modules()
    paths = [spec.target for spec in exported.graph_signature.input_specs if spec.target is not None]
    path = next((path for path in paths if path.partition(".")[0] in taken), None)
    if path is not None:
        raise CaptureError(
            f"{model} cannot be captured: it holds {path!r}, and {path.partition('.')[0]!r} is an attribute that graph "
            "modules have themselves; rename it, or capture a module that has the model as an attribute"
        )


def _check_not_sharded(module: nn.Module, arguments: Any) -> None:
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None:
        return
    state = ((name, tensor) for table in (module.named_parameters(), module.named_buffers()) for name, tensor in table)
    passed = (("an argument", leaf) for leaf in tensors_in(arguments))
    for name, tensor in (*state, *passed):
        if isinstance(tensor, distributed.DTensor):
            raise CaptureError(
                f"{name} is a DTensor, and a sharded model cannot be captured; capture it before it is sharded (by "
                "fully_shard or parallelize_module, say), or use partita inside torch.compile: "
                "torch.compile(model, backend='partita', options={...})"
            )


def _warn_of_checkpoints(program: Program, name: str) -> None:
    annotated = (node.meta.get("custom") for node in program.operators())
    count = len({custom[CHECKPOINT] for custom in annotated if isinstance(custom, Mapping) and CHECKPOINT in custom})
    if count:
        _LOG.warning(
            "%s calls torch.utils.checkpoint (%d times), which becomes a plain call: all of it is saved for backward. "
            "partita.plan(program, ByAnnotation(%r), Recompute()) recomputes the same calls",
            name,
            count,
            CHECKPOINT,
        )


def _training_flag(module: nn.Module) -> bool | str | None:
    """The training flag of all modules; None for a function without modules, which has none."""
    flags = {part.training for part in module.modules() if not isinstance(part, FunctionModule)}
    if len(flags) > 1:
        return "captured with some modules in training mode and others not"
    return flags.pop() if flags else None


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
    if any(isinstance(leaf, torch.Generator) for leaf in leaves_of((args, dict(kwargs or {})))):
        raise CaptureError(
            f"{name_of(model)} has no joint graph: an argument is a torch.Generator, and AOTAutograd traces none; let "
            "the model use the default generator"
        )
    owner = model if isinstance(model, nn.Module) else FunctionModule(model)
    with fresh_modes(grad=True):
        arguments = Arguments(owner, args, kwargs or {})
    module = capture(owner, args, kwargs or {}).module()
    try:
        traced = _traced(module, arguments)
        _check(traced, arguments)
    except CaptureError as error:
        raise CaptureError(f"{name_of(model)} has no joint graph: {error}") from error
    except Exception as error:
        raise CaptureError(f"{name_of(model)} has no joint graph: {summary_of(error)}") from error
    return Program.of(traced.graph_module, forward_outputs=traced.forward_outputs)


def check_options(model: object, args: object, kwargs: object) -> None:
    """Raises where these cannot be a model and its arguments."""
    if isinstance(model, Program | ExportedProgram):
        raise OptionError(
            f"this is a {type(model).__name__}, captured already; Program.of(...) takes it as it is, and its module() "
            "can be captured again"
        )
    if not callable(model):
        raise OptionError(f"a model is a torch.nn.Module or a function, not {type(model).__name__}")
    if not isinstance(args, tuple):
        raise OptionError(f"`args` is a tuple of all positional arguments, not {type(args).__name__}; give (x,)")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise OptionError("`kwargs` maps the names of keyword arguments to their values")


def _gradient_transform_reason() -> str:
    return (
        f"it runs a gradient transform such as torch.func.grad, and torch {torch.__version__} loses what that computes "
        "where a model is exported; call the transform outside of the model, or use partita inside torch.compile"
    )


def _reason(error: Exception) -> str:
    if _LOST_TENSOR in str(error):
        return (
            "it makes a tensor that no trace can follow. `.data` does: mutate under torch.no_grad() instead, and read "
            "what has no gradients with `.detach()`. So does torch.vmap with `out_dims` other than 0: leave that at 0, "
            "and move the axis of the result with `.movedim(0, axis)`"
        )
    if _FUNCTORCH_TENSOR in str(error):
        return _gradient_transform_reason()
    unknown = re.search(r"Found <class '([\w.<>]+)'> in output", str(error))
    if unknown is not None:
        return (
            f"it returns a {unknown[1]}, whose tensors torch does not know how to find. Wrap the model in a module "
            "that returns tensors, in tuples, lists or dicts if there are several, or register the class "
            "(torch.export.register_dataclass); a model of transformers returns no cache with "
            "model.config.use_cache = False"
        )
    return summary_of(error)


def summary_of(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


#: The error of torch.export for such a tensor, which asks to file an issue (2.13).
_LOST_TENSOR = "a fake tensor in the exported program constant's list"
#: And its error for tensors that `vjp` and `jacrev` wrap.
_FUNCTORCH_TENSOR = "meta conversion to view functorch tensor"


@final
@dataclass(frozen=True, slots=True)
class ModelCall:
    """A model and the arguments that it is traced with."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    dynamic_shapes: Any

    def exported(self) -> ExportedProgram:
        """The model as an exported program whose modes are set by operators.

        Traced once, and again for each mode of the caller that it depends on.
        """
        wrapping = WrapModesPass()
        program = self._run(wrapping, grad=True)
        if wrapping.recorder.queries_autocast:
            program, wrapping = self._with_callers_autocast(program, wrapping)
        recorder = wrapping.recorder
        if not recorder.depends_on_callers_grad:
            return program
        callers = self._callers_switches(wrapping)
        if not callers:
            return program
        return self._run(WrapModesPass(reports_autocast=recorder.reports_autocast, callers=callers), grad=True)

    def _with_callers_autocast(
        self, program: ExportedProgram, without: WrapModesPass
    ) -> tuple[ExportedProgram, WrapModesPass]:
        """The model traced as if its caller had autocast on, if that is correct with autocast off as well."""
        wrapping = WrapModesPass(reports_autocast=True)
        try:
            other = self._run(wrapping, grad=True)
        except Exception as error:
            self._warn(
                "cannot be traced as if autocast were on (%s); captured is what it does with autocast off", error
            )
            return program, without
        if wrapping.trace.only_switches_off_more(without.trace):
            return other, wrapping
        self._warn("behaves differently when its caller has autocast on; captured is what it does with autocast off")
        return program, without

    def _callers_switches(self, with_grad: WrapModesPass) -> tuple[GradSwitch, ...]:
        """The toggles that enable gradients only because the caller had them on."""
        without = TraceOnlyPass(reports_autocast=with_grad.recorder.reports_autocast)
        try:
            self._run(without, grad=False)
        except StopAfterTrace:
            pass
        except Exception as error:
            self._warn("cannot be traced with gradients off (%s); captured is what it does with gradients on", error)
            return ()
        if not without.trace.differs_in_grad_only(with_grad.trace):
            self._warn("behaves differently when gradients are off; captured is what it does with gradients on")
            return ()
        on, off = with_grad.grads, without.grads
        if any(was_off is False and is_on for was_off, is_on in zip(on.grads, off.grads, strict=True)):
            raise CaptureError(
                "it switches gradients off where its caller has them on, and on where its caller has them off, and no "
                "graph can express that; set the grad mode to a constant, or to the caller's own"
            )
        return tuple(switch for switch, number in on.first_operator.items() if off.grads[number] is False)

    def warn_if_it_differs_from(self, with_one_tensor: ModelCall) -> None:
        """Warns if the model computes something else where arguments are one tensor, as by `query is key`.

        Captured is what it does with different ones, since a graph takes each argument by itself.
        """
        traces = []
        for call in (self, with_one_tensor):
            traced = TraceOnlyPass(reports_autocast=False)
            try:
                call._run(traced, grad=True)
            except StopAfterTrace:
                traces.append(traced.trace)
            except Exception as error:
                _LOG.debug("%s cannot be traced with arguments that are one tensor: %s", name_of(self.model), error)
                return
        ours, theirs = traces
        if not ours.calls_the_same(theirs):
            self._warn(
                "does something else where two arguments are one tensor; captured is what it does with different ones"
            )

    def _warn(self, what: str, *values: object) -> None:
        _LOG.warning(f"%s {what}", name_of(self.model), *values)

    def _run(self, region_pass: WrapModesPass | TraceOnlyPass, *, grad: bool) -> ExportedProgram:
        return export_recorded(
            self.model,
            self.args,
            self.kwargs,
            dynamic_shapes=self.dynamic_shapes,
            recorder=region_pass.recorder,
            region_pass=region_pass,
            grad=grad,
        )


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


@final
class FunctionModule(nn.Module):
    """Calls a function; modules that it belongs to, is bound to, closes over or knows by a global name are its own.

    Functions of the same file that it calls are searched as well.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function  # First, so that no module gets that name.
        for name, module in _modules_used(function):
            if all(module is not known for known in self.modules()):
                self.add_module(_free_name(self, name), module)
        # On the instance, so that inspecting the signature of forward gives that of the function.
        self.forward = function if inspect.isroutine(function) else _routine(function)


def name_of(model: Callable[..., Any]) -> str:
    """What to call a model in a message: its class, or the function's own name."""
    if isinstance(model, FunctionModule | partial):
        return name_of(model.function if isinstance(model, FunctionModule) else model.func)
    return getattr(model, "__qualname__", type(model).__name__)


def _routine(function: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function that calls a callable object such as a partial: torch reads the code object of `forward`."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    forward.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return forward


def _modules_used(function: Callable[..., Any]) -> Iterator[tuple[str, nn.Module]]:
    home = _home(function)
    waiting: list[Any] = [function]
    done: set[int] = set()
    while waiting:
        current = waiting.pop(0)
        if id(current) in done:
            continue
        done.add(id(current))
        for name, value in _values_used(current):
            if isinstance(value, nn.Module):
                yield name, value
            elif isinstance(value, partial) or _home(value) == home:
                waiting.append(value)


def _home(value: Any) -> str | None:
    """The Python module in which a function or an object's class is defined."""
    while isinstance(value, partial):
        value = value.func
    return getattr(value, "__module__", None)


def _values_used(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, partial):
        yield "function", function.func
        yield from ((f"argument_{at}", value) for at, value in enumerate(function.args))
        yield from function.keywords.items()
        return
    if inspect.ismethod(function):
        yield "owner", function.__self__
        function = function.__func__
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        yield from getattr(function, "__dict__", {}).items()
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # A variable that has not been set yet.
            continue
    yield from ((name, function.__globals__.get(name)) for name in _global_names(function.__code__))


def _global_names(code: CodeType) -> Iterator[str]:
    """The global names that a function reads, inner functions included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _free_name(module: nn.Module, name: str) -> str:
    while hasattr(module, name) or name in attributes_of_graph_modules():
        name = f"{name}_"
    return name
