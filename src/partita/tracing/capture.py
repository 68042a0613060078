"""Capturing a model: its operators, with every grad, inference and autocast block that its author wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from partita._torch.capture_constants import is_only_traced
from partita.errors import CaptureError, OptionError, PartitaError
from partita.graphs.program import Program
from partita.rewrite.inline import inline
from partita.tracing.function_module import FunctionModule, name_of
from partita.tracing.recorded_export import ModelCall

__all__ = ["capture", "check_options"]


def capture(
    model: nn.Module | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Program:
    """The program that a model runs for these arguments; `args`, `kwargs`, `dynamic_shapes` are as for torch.export.

    The modes that `capture` is called under make no difference. Blocks of the model are kept as they were written, and
    outside of them the program follows whoever calls it; it leaves no mode switched behind. A model that asks for the
    modes of its caller is traced again under another answer: what it only hands on is kept, and if it does something
    else altogether, a warning is logged and the program is what it does with gradients on and autocast off. Whether
    the caller is in inference mode is always answered with no. A checkpointed call becomes a plain call with the same
    values and gradients: what to keep and what to compute again is for whoever treats the graph.
    """
    check_options(model, args, kwargs)
    try:
        module = model if isinstance(model, nn.Module) else FunctionModule(model)
        exported = ModelCall(module, args, kwargs, dynamic_shapes).exported()
    except CaptureError as error:
        raise CaptureError(f"{name_of(model)} cannot be captured: {error}") from error
    except PartitaError as error:
        error.add_note(f"This happened while {name_of(model)} was captured.")
        raise
    except Exception as error:
        raise CaptureError(f"{name_of(model)} cannot be captured: {_reason(error)}") from error
    if is_only_traced((*exported.constants.values(), *exported.state_dict.values())):
        raise CaptureError(f"{name_of(model)} cannot be captured: {_of_gradient_transform()}")
    return inline(Program.of(exported))


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


def _of_gradient_transform() -> str:
    return (
        f"it runs a gradient transform such as torch.func.grad, and torch {torch.__version__} loses what that computes "
        "where a model is exported; call the transform outside of the model, or use partita inside torch.compile"
    )


def _reason(error: Exception) -> str:
    if _LOST_TENSOR in str(error):
        return (
            "it makes a tensor that no trace can follow. `.data` does: write under torch.no_grad() instead, and read "
            "what has no gradients with `.detach()`. So does torch.vmap with `out_dims` other than 0: leave that at 0, "
            "and move the axis of the result with `.movedim(0, axis)`"
        )
    if _FUNCTORCH_TENSOR in str(error):
        return _of_gradient_transform()
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


#: What torch.export says of it, and that one should file an issue (2.13).
_LOST_TENSOR = "a fake tensor in the exported program constant's list"
#: And of what `vjp` and `jacrev` wrap.
_FUNCTORCH_TENSOR = "meta conversion to view functorch tensor"
