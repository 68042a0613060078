"""A function as a module: the modules that it uses become its submodules."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any, final

from torch import nn


@final
class FunctionModule(nn.Module):
    """Calls a function; modules that it belongs to, is bound to, closes over or knows by a global name are its own.

    Functions of the same file that it calls are searched as well.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        for name, module in _modules_used(function):
            if all(module is not known for known in self.modules()):
                self.add_module(_free_name(self, name), module)
        self.function = function
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
    while hasattr(module, name):
        name = f"{name}_"
    return name
