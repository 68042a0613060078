"""The specialization key of a call, and which sizes are dynamic in it.

Compiled code is specialized on everything about a call but the contents of its tensors: dtypes, devices, sizes,
strides, constants, the structure of containers, global state, and the modules that the body calls.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partita._torch.fx.structural_hash import modules_key, settings_of
from partita._torch.nn_modules import call_overrides, every_module_has_hooks, hooks_of
from partita._torch.symbolic_shapes import symbol_of
from partita.analysis.nodes import value_of
from partita.lowering._torch.containers import Shape, leaf_count
from partita.lowering._torch.guards import GlobalState
from partita.program.program import Program

#: A size by input and axis; the axis of an integer is None.
Place: TypeAlias = tuple[int, int | None]

#: For each input of a body the symbols of its sizes, or its own symbol, by name; None for what was traced as static.
TracedSymbols: TypeAlias = tuple[tuple[str | None, ...] | str | None, ...]


def traced_symbols(program: Program) -> TracedSymbols:
    """The symbols of traced inputs, numbered in order; a compound expression counts as a symbol of its own."""
    numbers: dict[object, str] = {}
    found: list[tuple[str | None, ...] | str | None] = []

    def name(size: object, place: object) -> str | None:
        if not isinstance(size, torch.SymInt):
            return None
        symbol = symbol_of(size)
        return numbers.setdefault(place if symbol is None else symbol, f"s{len(numbers)}")

    for node in program.graph.find_nodes(op="placeholder"):
        value = value_of(node)
        if isinstance(value, Tensor):
            found.append(tuple([name(size, (node, axis)) for axis, size in enumerate(value.shape)]))
        else:
            found.append(name(value, node))
    return tuple(found)


@final
@dataclass(frozen=True, slots=True)
class DynamicSizes:
    """Which sizes and integers are symbols for the compiler, so that one function serves them all.

    These are those that were traced as symbols and those that have changed between calls, unless `dynamic` is set.
    """

    traced: TracedSymbols = ()
    dynamic: bool | None = None
    changed: frozenset[Place] = frozenset()

    def of(self, signature: Signature, call: Call) -> dict[Place, Hashable]:
        """The key of the symbol for each dynamic size of a call; two sizes that were traced as one symbol share it.

        The sizes of parameters and of module state are static.
        """
        if self.dynamic is False:
            return {}
        count = sum(map(leaf_count, call.shapes))
        found: dict[Place, Hashable] = {}
        known: dict[str, int] = {}
        for place, size in _sizes(signature, call.values[:count]):
            symbol = self._symbol(place) if count == len(self.traced) else None
            if symbol is not None:
                # A call with sizes that violate the equalities of the trace gets a symbol for each.
                found[place] = symbol if known.setdefault(symbol, size) == size else place
            elif self.dynamic or place in self.changed:
                found[place] = place
        return found

    def after(self, one: Signature, other: Signature) -> DynamicSizes:
        """The dynamic sizes after calls with these two signatures, whose static keys are equal."""
        places = {
            (place, axis)
            for place, (spec, now) in enumerate(zip(one.specs, other.specs, strict=True))
            for axis in _differing(spec, now)
        }
        return DynamicSizes(self.traced, self.dynamic, self.changed | places)

    def _symbol(self, place: Place) -> str | None:
        number, axis = place
        traced = self.traced[number]
        if axis is None:
            return traced if isinstance(traced, str) else None
        return traced[axis] if isinstance(traced, tuple) and axis < len(traced) else None


def _sizes(signature: Signature, values: Sequence[object]) -> list[tuple[Place, int]]:
    """All sizes of these values, then all integers among them: a symbol for both is a size."""
    sizes: list[tuple[Place, int]] = [
        ((number, axis), size)
        for number, (spec, value) in enumerate(zip(signature.specs, values, strict=False))
        if isinstance(spec, TensorSpec) and not isinstance(value, nn.Parameter)
        for axis, size in enumerate(spec.sizes)
    ]
    for number, value in enumerate(values):
        if type(value) is int:
            sizes.append(((number, None), value))
    return sizes


def _differing(one: TensorSpec | Constant, other: TensorSpec | Constant) -> list[int | None]:
    if isinstance(one, TensorSpec) and isinstance(other, TensorSpec):
        return [axis for axis, (old, new) in enumerate(zip(one.sizes, other.sizes, strict=True)) if old != new]
    return [None] if one != other else []


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The metadata of a tensor; `leaf` only matters where the body mutates it while gradients are enabled."""

    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    leaf: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def static_key(self) -> object:
        """Everything but sizes and strides."""
        return self.dtype, self.device, self.requires_grad, self.leaf, len(self.sizes)


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is not a tensor; two are equal if their types and their texts are equal."""

    type: type
    text: str

    @property
    def static_key(self) -> object:
        """The type."""
        return self.type


ValueSpec: TypeAlias = TensorSpec | Constant


class Call(NamedTuple):
    """The flat arguments of compiled code, and how they follow from the inputs and modules of the body."""

    values: Sequence[Any]
    shapes: tuple[Shape, ...]
    #: The modules of the body; None if it calls none.
    modules: ModuleSnapshot | None = None

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The sources of the values that are module state; they follow those of the inputs."""
        return () if self.modules is None else self.modules.state.slots

    def places_of(self, inputs: Collection[int]) -> Iterator[int]:
        """The places of the values in these inputs."""
        start = 0
        for number, shape in enumerate(self.shapes):
            end = start + leaf_count(shape)
            if number in inputs:
                yield from range(start, end)
            start = end

    def mutable_state(self) -> Iterator[int]:
        """The places of module state that may be mutated: anything but parameters."""
        slots = enumerate(self.slots, len(self.values) - len(self.slots))
        return (place for place, slot in slots if slot.table != "_parameters")


@final
@dataclass(frozen=True, slots=True)
class Signature:
    """The global state of a call and the specs of its values: first the inputs, then the state of modules.

    `shapes` are the container structures of the inputs, `modules` is the key of the modules in the body, and
    `training` are their training flags.
    """

    global_state: GlobalState
    specs: tuple[ValueSpec, ...]
    shapes: tuple[Shape, ...]
    modules: Hashable = ()
    training: tuple[bool, ...] = ()

    @property
    def static_key(self) -> object:
        """Everything but sizes, strides and the values of constants."""
        return (
            self.global_state,
            self.shapes,
            self.modules,
            self.training,
            tuple(spec.static_key for spec in self.specs),
        )

    @property
    def family(self) -> object:
        """What is left without sizes, constants, lengths of containers and module settings, of which a program may have
        any number."""
        return self.global_state, frozenset(spec.static_key for spec in self.specs)

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward pass through the call is possible."""
        required = (isinstance(spec, TensorSpec) and spec.requires_grad for spec in self.specs)
        return self.global_state.has_gradients and any(required)


def signature_of(
    call: Call, global_state: GlobalState, *, mutated: Collection[int] = (), picks_kernels: bool = False
) -> Signature:
    """The signature of a call that mutates the values at the places in `mutated`.

    For a backend that picks eager kernels, `requires_grad` matters even while gradients are disabled: `linear` is one
    product or several.
    """
    grad = global_state.has_gradients
    specs = (
        _spec_of(value, grad=grad, is_mutated=place in mutated, tracks_grad=grad or picks_kernels)
        for place, value in enumerate(call.values)
    )
    if call.modules is None:
        return Signature(global_state, tuple(specs), call.shapes)
    return Signature(global_state, tuple(specs), call.shapes, call.modules.state.key, call.modules.training)


def unfit_reason(value: Any) -> str | None:
    """Why no code can be compiled for a value as an input; None if it can."""
    if type(value) in _CONSTANTS or isinstance(value, torch.dtype | torch.device):
        return None
    if type(value) not in _TENSORS:
        return f"is of type {type(value).__name__}"
    if value.layout is not torch.strided:
        return f"has the layout {str(value.layout).removeprefix('torch.')}"
    if value.is_quantized:
        return "is quantized"
    if value.is_conj() or value.is_neg():
        return "is conjugated or negated lazily"
    return None


_CONSTANTS = (int, float, complex, bool, str, type(None))
_TENSORS = (Tensor, nn.Parameter)


def _spec_of(value: Any, *, grad: bool, is_mutated: bool, tracks_grad: bool) -> ValueSpec:
    if not isinstance(value, Tensor):
        return Constant(type(value), repr(value))
    return TensorSpec(
        value.dtype,
        value.device,
        tracks_grad and value.requires_grad,
        not (grad and is_mutated) or value.is_leaf,
        tuple(value.shape),
        value.stride(),
    )


# Modules that a body calls. Their tensors may be replaced, moved and mutated between calls, so they are read for each
# call. Any other change, to an option, a hook or a submodule, invalidates the state.


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """Where a module in a body holds a tensor: which module, in which of its tables, under which name."""

    path: str
    table: str
    name: str


class ModuleSnapshot(NamedTuple):
    """The modules of a body at the time of one call; `training` are their training flags."""

    state: ModuleState
    training: tuple[bool, ...]


@final
class ModuleState:
    """All modules that a body calls, as of construction; none for most bodies."""

    def __init__(self, body: GraphModule) -> None:
        called = {str(node.target): None for node in body.graph.find_nodes(op="call_module")}
        modules = {path: module for target in called for path, module in _modules_below(body, target)}
        self._body = body
        self._modules = list(modules.values())
        self.slots = tuple(slot for path, module in modules.items() for slot in _slots_of(path, module))
        self._tables = [_table(modules[slot.path], slot.table) for slot in self.slots]
        self._names = [slot.name for slot in self.slots]
        #: Whether the body still calls these modules, and nothing but tensors and training flags has changed.
        self.is_current = _ModuleGuard(body, modules).holds

    def read(self) -> list[Tensor | None]:
        """The tensors now, in the order of the slots."""
        return list(map(dict.get, self._tables, self._names))

    def snapshot(self) -> ModuleSnapshot:
        """The modules as of now."""
        return ModuleSnapshot(self, tuple([module.training for module in self._modules]))

    @cached_property
    def key(self) -> tuple[Hashable, ...]:
        """Equal to that of another state if both can share compiled code."""
        return modules_key(self._body)

    @cached_property
    def call_overrides(self) -> str | None:
        """Which module overrides its call in a way that a trace would lose, in words; None if none does."""
        if every_module_has_hooks():
            return "every module runs hooks"
        found = ((type(module).__name__, call_overrides(module)) for module in self._modules)
        return next((f"a {name} in it {reason}" for name, reason in found if reason is not None), None)

    def __bool__(self) -> bool:
        return bool(self._modules)


@final
class _ModuleGuard:
    """Detects that modules have changed; it is checked in every call, so it takes a few microseconds at most."""

    def __init__(self, body: GraphModule, modules: Mapping[str, nn.Module]) -> None:
        self._modules = list(modules.values())
        self._types = list(map(type, self._modules))
        held = [*_places_of(body, modules), *(entry for module in self._modules for entry in _held_by(module))]
        self._held = [(holder.get, name, value) for holder, name, value in held]
        self._have_hooks = every_module_has_hooks()
        tables = [table for module in self._modules for table in _tables_of(module)]
        self._empty = [table for table in tables if not table]
        self._filled = [table for table in tables if table]
        self._counts = list(map(len, self._filled))
        containers = (value for _, _, value in held if isinstance(value, list | dict))
        self._containers = [(container, _contents(container)) for container in containers]

    def holds(self) -> bool:
        if any(self._empty) or list(map(len, self._filled)) != self._counts:
            return False
        if every_module_has_hooks() is not self._have_hooks:
            return False
        for get, name, value in self._held:
            if get(name) is not value:
                return False
        for container, before in self._containers:
            now = _contents(container)
            if len(now) != len(before) or not all(map(is_, now, before)):
                return False
        return list(map(type, self._modules)) == self._types


def _contents(container: list[Any] | dict[Any, Any]) -> list[Any]:
    return list(container) if isinstance(container, list) else [*container, *container.values()]


def _places_of(body: GraphModule, modules: Mapping[str, nn.Module]) -> Iterator[tuple[dict[str, Any], str, object]]:
    for path, module in modules.items():
        folder, _, name = path.rpartition(".")
        yield body.get_submodule(folder)._modules, name, module


def _held_by(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, object]]:
    """The options of a module, and its parameters, buffers and submodules that are None."""
    if isinstance(module, GraphModule):
        yield from ((vars(module), name, vars(module).get(name)) for name in _OF_GRAPH_MODULES)
    else:
        yield from ((vars(module), name, value) for name, value in settings_of(module) if not isinstance(value, Tensor))
    for table in (module._parameters, module._buffers, module._modules):
        yield from ((table, name, None) for name, value in table.items() if value is None)


_OF_GRAPH_MODULES = ("_graph", "forward", "_compiled_call_impl")


def _tables_of(module: nn.Module) -> Iterator[Mapping[Any, Any]]:
    yield from hooks_of(module)
    yield from (module._parameters, module._buffers, module._modules)
    if not isinstance(module, GraphModule):  # Lazy graph modules set attributes on themselves at the first call.
        yield vars(module)


def _modules_below(body: GraphModule, target: str) -> Iterator[tuple[str, nn.Module]]:
    for path, module in body.get_submodule(target).named_modules(remove_duplicate=False):
        yield (f"{target}.{path}" if path else target), module


def _slots_of(path: str, module: nn.Module) -> Iterator[Slot]:
    for table in ("_parameters", "_buffers", "__dict__"):
        held = _table(module, table).items()
        yield from (Slot(path, table, name) for name, value in held if isinstance(value, Tensor))


def _table(module: nn.Module, name: str) -> dict[str, Any]:
    return module.__dict__ if name == "__dict__" else module.__dict__[name]
