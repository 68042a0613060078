"""Calls of a backend without anything between: each kind of call is compiled as the protocol says, and called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import GraphModule

from partita._torch.ambient import read_ambient
from partita._torch.lowering_compiling import compiler_scope
from partita._torch.lowering_conditions import Check, check_from, conditions_of, symbolic_places
from partita._torch.lowering_fakes import FakeInputs, strides_of
from partita.backends import Backend
from partita.runtime.checked_outputs import WrongOutputsError, check_outputs

__all__ = ["CompiledCalls"]


@final
@dataclass(frozen=True, slots=True)
class _Made:
    function: Callable[..., Sequence[Any]]
    serves: Check | None


@final
class CompiledCalls:
    """Calls what `backend` makes of `body`; with `symbols`, one function serves all sizes that its guards allow.

    It is no module: comparisons put the attributes of modules back as they were.
    """

    def __init__(self, backend: Backend, body: GraphModule, *, symbols: bool = False) -> None:
        self._backend, self._body, self._symbols = backend, body, symbols
        self._made: dict[Any, list[_Made]] = {}
        given = body.graph.output_node().args[0]
        self._count = len(given) if isinstance(given, tuple | list) else None
        #: What compiling changed although it should not.
        self.disturbed: dict[str, None] = {}
        #: What is no function, or gives no outputs.
        self.misgiven: dict[str, None] = {}
        #: Why the body was called itself.
        self.failed: dict[str, None] = {}

    @property
    def functions(self) -> list[Callable[..., Sequence[Any]]]:
        """All that was made."""
        found = [made.function for several in self._made.values() for made in several]
        return [function for function in found if function is not self._body]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        several = self._made.setdefault(_kind(inputs, sizes=not self._symbols), [])
        found = next((made for made in several if made.serves is None or made.serves(inputs)), None)
        if found is None:
            found = self._compiled(inputs)
            several.append(found)
        outputs = found.function(*inputs)
        try:
            check_outputs(outputs, count=self._count, tensors=())
        except WrongOutputsError as error:
            self.misgiven[f"a compiled function {error}"] = None
        return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)

    def _compiled(self, inputs: Sequence[Any]) -> _Made:
        body, fakes = copy.deepcopy(self._body), FakeInputs()
        given = [_fake(value, place, fakes, symbols=self._symbols) for place, value in enumerate(inputs)]
        places = symbolic_places(given)
        with compiler_scope():
            looks, modes, dtype = [_look(value) for value in given], read_ambient(), torch.get_default_dtype()
            try:
                function = self._backend.compile(body, given)
            except Exception as error:
                self.failed[f"{type(error).__name__}: {error}".partition("\n")[0]] = None
                return _Made(self._body, None)
            if read_ambient() != modes:
                self.disturbed["compiling leaves modes switched"] = None
            if torch.get_default_dtype() is not dtype:
                self.disturbed["compiling leaves the default dtype switched"] = None
            if [_look(value) for value in given] != looks:
                self.disturbed["compiling changes its fake inputs"] = None
        if not callable(function):
            self.misgiven[f"`compile` gives a function, not {function!r}"] = None
            return _Made(self._body, None)
        conditions = conditions_of(places, fakes.env)
        return _Made(function, None if conditions is None else check_from(conditions))


def _kind(inputs: Sequence[Any], *, sizes: bool) -> tuple[Any, ...]:
    """What a compiled function rests on."""
    looks = [_look(value) if sizes or not isinstance(value, Tensor | int) else _kind_of(value) for value in inputs]
    return (read_ambient(), *looks)


def _kind_of(value: Tensor | int) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.dim(), value.requires_grad
    return type(value)


def _look(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.device, tuple(value.shape), tuple(value.stride()), value.requires_grad, value.is_leaf
    return type(value), str(value)


def _fake(value: Any, place: int, fakes: FakeInputs, *, symbols: bool) -> Any:
    if not isinstance(value, Tensor):
        return fakes.number(value, place) if symbols and type(value) is int else value
    sizes = tuple(value.shape)
    faked = [fakes.size(size, (place, axis)) if symbols and not axis else size for axis, size in enumerate(sizes)]
    return fakes.tensor(
        faked,
        strides_of(sizes, value.stride(), faked),
        dtype=value.dtype,
        device=value.device,
        requires_grad=value.requires_grad,
        is_leaf=value.is_leaf,
    )
