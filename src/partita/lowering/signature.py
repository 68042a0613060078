"""What code is specialized on; dynamic sizes."""

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
from partita._torch.nn_modules import HOOKS_OF_ALL, call_overrides, hooks_of
from partita.lowering._torch.containers import Shape, leaf_count
from partita.lowering._torch.guards import GlobalState
from partita.program.body_effects import TracedSymbols

__all__ = [
    "Call",
    "DynamicSizes",
    "ModuleLook",
    "ModuleState",
    "Place",
    "Signature",
    "Slot",
    "TensorLook",
    "signature_of",
    "unfit_reason",
]


# Open sizes: which sizes and integers of a call a compiler gets as symbols, so that one function serves them all.


#: A size by input and axis; the axis of an integer is None.
Place: TypeAlias = tuple[int, int | None]


@final
@dataclass(frozen=True, slots=True)
class DynamicSizes:
    """What is open: what was traced as a symbol, and what has been seen to change, unless `dynamic` says otherwise."""

    traced: TracedSymbols = ()
    dynamic: bool | None = None
    changed: frozenset[Place] = frozenset()

    def of(self, signature: Signature, call: Call) -> dict[Place, Hashable]:
        """The key of the symbol for each open size of a call; two sizes that were traced as one symbol share it.

        Parameters and the state of modules have no open sizes.
        """
        if self.dynamic is False:
            return {}
        count = call.input_count
        found: dict[Place, Hashable] = {}
        known: dict[str, int] = {}
        for place, size in _sizes(signature, call.values[:count]):
            symbol = self._symbol(place) if count == len(self.traced) else None
            if symbol is not None:
                # Whoever calls the program with sizes that its trace would have refused gets a symbol for each.
                found[place] = symbol if known.setdefault(symbol, size) == size else place
            elif self.dynamic or place in self.changed:
                found[place] = place
        return found

    def after(self, one: Signature, other: Signature) -> DynamicSizes:
        """What is open once calls of these two signatures, which are of one kind, have been seen."""
        places = {
            (place, axis)
            for place, (look, now) in enumerate(zip(one.looks, other.looks, strict=True))
            for axis in _differing(look, now)
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
        for number, (look, value) in enumerate(zip(signature.looks, values, strict=False))
        if isinstance(look, TensorLook) and not isinstance(value, nn.Parameter)
        for axis, size in enumerate(look.sizes)
    ]
    for number, value in enumerate(values):
        if type(value) is int:
            sizes.append(((number, None), value))
    return sizes


def _differing(one: TensorLook | Constant, other: TensorLook | Constant) -> list[int | None]:
    if isinstance(one, TensorLook) and isinstance(other, TensorLook):
        return [axis for axis, (old, new) in enumerate(zip(one.sizes, other.sizes, strict=True)) if old != new]
    return [None] if one != other else []


# A signature: what compiled code must know of one call, beside the contents of its tensors.


@final
@dataclass(frozen=True, slots=True)
class TensorLook:
    """What a tensor looks like from outside; `leaf` matters only where the body writes it, with gradients."""

    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    leaf: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def kind(self) -> object:
        """Everything but sizes and strides."""
        return self.dtype, self.device, self.requires_grad, self.leaf, len(self.sizes)


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is no tensor; equal to another if the two are of one type and print alike."""

    type: type
    text: str

    @property
    def kind(self) -> object:
        """The type."""
        return self.type


Look: TypeAlias = TensorLook | Constant


class Call(NamedTuple):
    """The values that compiled code is called with, and how the inputs and modules of the body give them."""

    values: Sequence[Any]
    shapes: tuple[Shape, ...]
    #: The modules of the body; None if it calls none.
    modules: ModuleLook | None = None

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Where the values come from that are no inputs; they are the last ones."""
        return () if self.modules is None else self.modules.state.slots

    @property
    def input_count(self) -> int:
        """How many of the values come from inputs."""
        return sum(map(leaf_count, self.shapes))

    def places_of(self, inputs: Collection[int]) -> Iterator[int]:
        """The places of the values in these inputs."""
        start = 0
        for number, shape in enumerate(self.shapes):
            end = start + leaf_count(shape)
            if number in inputs:
                yield from range(start, end)
            start = end

    def state_that_may_be_written(self) -> Iterator[int]:
        """The places of what modules may write: anything but parameters."""
        slots = enumerate(self.slots, len(self.values) - len(self.slots))
        return (place for place, slot in slots if slot.table != "_parameters")


@final
@dataclass(frozen=True, slots=True)
class Signature:
    """The surroundings of a call and the looks of its values: those in the inputs, then the state of modules.

    `shapes` tell how the inputs are made up of values. Of the modules in the body, `modules` is the key, and `training`
    what they are set to.
    """

    surroundings: GlobalState
    looks: tuple[Look, ...]
    shapes: tuple[Shape, ...]
    modules: Hashable = ()
    training: tuple[bool, ...] = ()

    @property
    def kind(self) -> object:
        """Everything but sizes, strides and the values of constants: two calls of one kind differ in size at most."""
        return self.surroundings, self.shapes, self.modules, self.training, tuple(look.kind for look in self.looks)

    @property
    def family(self) -> object:
        """What two calls have in common that differ in sizes, in constants, in how many values are in containers, and
        in how modules are set; a program may go through such changes without end."""
        return self.surroundings, frozenset(look.kind for look in self.looks)

    @property
    def needs_gradients(self) -> bool:
        """Whether anyone may ask for a backward pass."""
        asks = (isinstance(look, TensorLook) and look.requires_grad for look in self.looks)
        return self.surroundings.has_gradients and any(asks)


def signature_of(
    call: Call, surroundings: GlobalState, *, written: Collection[int] = (), picks_kernels: bool = False
) -> Signature:
    """The signature of a call, of whose values those at the places in `written` are written.

    Where kernels are picked as eager mode does, it matters which values require gradients although none flow: `linear`
    is one product or several.
    """
    grad = surroundings.has_gradients
    looks = (
        _look(value, grad=grad, is_written=place in written, is_marked=grad or picks_kernels)
        for place, value in enumerate(call.values)
    )
    if call.modules is None:
        return Signature(surroundings, tuple(looks), call.shapes)
    return Signature(surroundings, tuple(looks), call.shapes, call.modules.state.key, call.modules.training)


def unfit_reason(value: Any) -> str | None:
    """Why no code can be made for a value as an input; None if it can."""
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


def _look(value: Any, *, grad: bool, is_written: bool, is_marked: bool) -> Look:
    if not isinstance(value, Tensor):
        return Constant(type(value), repr(value))
    return TensorLook(
        value.dtype,
        value.device,
        is_marked and value.requires_grad,
        not (grad and is_written) or value.is_leaf,
        tuple(value.shape),
        value.stride(),
    )


# The modules that a body calls as they are now: their tensors, read anew for each call, and whether they have
# changed.
#
# Tensors may be loaded, moved and written. Whatever else changes, an option, a hook or a submodule, makes another
# state.


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """Where a module in a body holds a tensor: which module, in which of its tables, under which name."""

    path: str
    table: str
    name: str


class ModuleLook(NamedTuple):
    """The modules of a body as one call finds them; `training` are their training flags."""

    state: ModuleState
    training: tuple[bool, ...]


@final
class ModuleState:
    """All modules that a body calls, as they were found; none for most bodies."""

    def __init__(self, body: GraphModule) -> None:
        called = {str(node.target): None for node in body.graph.find_nodes(op="call_module")}
        modules = {path: module for target in called for path, module in _modules_below(body, target)}
        self._body = body
        self._modules = list(modules.values())
        self.slots = tuple(slot for path, module in modules.items() for slot in _slots_of(path, module))
        self._tables = [_table(modules[slot.path], slot.table) for slot in self.slots]
        self._names = [slot.name for slot in self.slots]
        #: Whether the body still calls these modules, and nothing but tensors and training flags has changed.
        self.is_current = _Stamp(body, modules).holds

    def read(self) -> list[Tensor | None]:
        """The tensors now, in the order of the slots."""
        return list(map(dict.get, self._tables, self._names))

    def look(self) -> ModuleLook:
        """What a call finds now."""
        return ModuleLook(self, tuple([module.training for module in self._modules]))

    @cached_property
    def key(self) -> tuple[Hashable, ...]:
        """Equal to that of another state if the same code can be made for both."""
        return modules_key(self._body)

    @cached_property
    def call_overrides(self) -> str | None:
        """Which module does what a compiler would lose, and what, in words; None if none does."""
        if any(HOOKS_OF_ALL):
            return "every module runs hooks"
        found = ((type(module).__name__, call_overrides(module)) for module in self._modules)
        return next((f"a {name} in it {reason}" for name, reason in found if reason is not None), None)

    def __bool__(self) -> bool:
        return bool(self._modules)


@final
class _Stamp:
    """What tells that modules have changed; it is asked in every call, so it takes a few microseconds at most."""

    def __init__(self, body: GraphModule, modules: Mapping[str, nn.Module]) -> None:
        self._modules = list(modules.values())
        self._types = list(map(type, self._modules))
        held = [*_places_of(body, modules), *(entry for module in self._modules for entry in _held_by(module))]
        self._held = [(holder.get, name, value) for holder, name, value in held]
        tables = [*HOOKS_OF_ALL, *(table for module in self._modules for table in _tables_of(module))]
        self._empty = [table for table in tables if not table]
        self._filled = [table for table in tables if table]
        self._counts = list(map(len, self._filled))
        containers = (value for _, _, value in held if isinstance(value, list | dict))
        self._containers = [(container, _contents(container)) for container in containers]

    def holds(self) -> bool:
        if any(self._empty) or list(map(len, self._filled)) != self._counts:
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
    """The options of a module, and the places where it has no tensor or submodule, but might."""
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
    if not isinstance(module, GraphModule):  # One whose code is made when it is first called keeps notes on itself.
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
