"""Guards: whether a compiled function that fitted one call fits the next, by its tensors, sizes and the global state.

Those on tensors and global state are fast and conservative: a call that they reject may still be served, which
`Variant.serves` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.jit import is_tracing  # type: ignore[attr-defined]  # Documented, but not in `__all__`.
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from partita._torch.expressions import Expression, ExpressionError, Operation, Read, evaluator
from partita._torch.functorch import count_levels
from partita._torch.modes import Tracing, enabled_autocast, in_forward_mode, tracing_now
from partita._torch.stacks import DEVICE_MODE
from partita._torch.symbolic_shapes import symbolic_expression
from partita.lowering._torch.gradients import hides_history, is_leaf
from partita.program._torch.guards import functions_of_conditions

try:
    from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
except ImportError:
    GlobalStateGuard = TensorGuards = None  # type: ignore[assignment, misc]


#: The sizes and strides that an input must have; None where they are dynamic.
Dimensions = tuple[Sequence[int | None], Sequence[int | None]]


@final
class Guard:
    """Accepts inputs like `values`, in the current global state, except for sizes that are None in `dimensions`.

    `constants` are the places of inputs that must be equal to those in `values`, `integers` of those that need not be,
    and `readable` of those whose `grad_fn` autograd must not refuse to return.
    """

    __slots__ = (
        "_constants",
        "_count",
        "_depth",
        "_device",
        "_inference",
        "_integers",
        "_is_able",
        "_leaves",
        "_readable",
        "_select_tensors",
        "_state",
        "_tensors",
    )

    def __init__(
        self,
        values: Sequence[Any],
        dimensions: Sequence[Dimensions | None],
        *,
        constants: Sequence[int] = (),
        integers: Sequence[int] = (),
        leaves: Sequence[int] = (),
        readable: Sequence[int] = (),
    ) -> None:
        tensors = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
        chosen = [dimensions[place] or ((), ()) for place in tensors]
        self._select_tensors = None if len(tensors) == len(values) else _getter(tensors)
        self._count = len(values)
        self._constants = tuple((place, type(values[place]), _exact(values[place])) for place in constants)
        self._integers = tuple(integers)
        self._leaves = tuple((place, values[place].is_leaf) for place in leaves)
        self._readable = tuple(readable)
        self._depth, self._device = len(_get_current_function_mode_stack()), default_device()
        self._inference = torch.is_inference_mode_enabled()
        self._is_able = TensorGuards is not None
        if self._is_able:
            self._state: Any = GlobalStateGuard()
            make: Any = TensorGuards  # Its stub has other types than it takes.
            self._tensors: Any = make(
                *(values[place] for place in tensors),
                dynamic_dims_sizes=[list(sizes) for sizes, _ in chosen],
                dynamic_dims_strides=[list(strides) for _, strides in chosen],
            )

    def accepts(self, values: Sequence[Any]) -> bool:
        """Whether the guarded function may be called with these values."""
        if (
            not self._is_able
            or len(values) != self._count
            or _get_current_dispatch_mode_stack()
            or len(_get_current_function_mode_stack()) != self._depth
            or forward_ad._current_level >= 0
            or is_tracing()
            or not self._state.check()
        ):
            return False
        if self._depth and default_device() != self._device:
            return False
        if not self._tensors.check(*(values if self._select_tensors is None else self._select_tensors(values))):
            return False
        if torch.is_inference_mode_enabled() is not self._inference:
            return False
        for place, kind, exact in self._constants:
            if type(values[place]) is not kind or _exact(values[place]) != exact:
                return False
        for place in self._integers:
            if type(values[place]) is not int:
                return False
        if self._readable and any(hides_history(values[place]) for place in self._readable):
            return False
        return not self._leaves or all(is_leaf(values[place]) is leaf for place, leaf in self._leaves)


def _exact(value: Any) -> Any:
    """A constant in a form with exact equality: 0.0 equals -0.0, and nan does not equal itself."""
    return repr(value) if isinstance(value, float | complex) else value


def _getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


#: Whether a profiler is active.
profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled


class GlobalState(NamedTuple):
    """The global state that determines, with the inputs, what a body computes."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    default_dtype: torch.dtype
    default_device: torch.device
    deterministic: bool

    @property
    def has_gradients(self) -> bool:
        """Whether a result may have a `grad_fn`."""
        return self.grad and not self.inference


def read_global_state() -> GlobalState:
    """The current global state."""
    return GlobalState(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        enabled_autocast(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
    )


def is_intercepted() -> bool:
    """Whether operators are intercepted: by a tracer, torch.func, forward-mode AD, or modes of the user."""
    if not all(map(_is_custom_op_analysis, _get_current_dispatch_mode_stack())) or default_device() is None:
        return True
    if is_tracing() or in_forward_mode() or count_levels():
        return True
    return tracing_now() is not Tracing.NOT


def _is_custom_op_analysis(mode: object) -> bool:
    """Whether a mode is the one with which AOTAutograd checks custom operators in the first call of compiled code."""
    return type(mode).__name__ == "_AnalyzeCustomOpInputOutputMode" and type(mode).__module__.startswith("torch.")


def default_device() -> torch.device | None:
    """The device of new tensors; None where function modes other than those of default devices are active."""
    if not all(type(mode) is DEVICE_MODE for mode in _get_current_function_mode_stack()):
        return None
    return torch.get_default_device()


# Guards on sizes. A compiler adds them to the shape environment of its fake inputs, and its code is only valid where
# they hold. They are kept as data, which closures check.


#: Whether a compiled function may be used for these inputs.
Check: TypeAlias = Callable[[Sequence[Any]], bool]


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where a number is among the inputs of a call, and the symbolic number that was there for the compiler."""

    read: Read
    #: The expression before compilation: what a compiler finds to be equal, it replaces in all numbers.
    expression: Any
    hint: int | None

    @classmethod
    def of(cls, read: Read, number: torch.SymInt) -> Place:
        """The place of a number that no compiler has seen."""
        return cls(read, number.node.expr, number.node.hint)


def symbolic_places(inputs: Sequence[Any]) -> list[Place]:
    """Every symbolic number of fake inputs, sizes and integers first; call it before compilation."""
    found: list[Place] = []
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor):
            found += [Place.of(Read(place, "size", axis), size) for axis, size in _symbolic(value.shape)]
        elif isinstance(value, torch.SymInt):
            found.append(Place.of(Read(place), value))
    for place, value in enumerate(inputs):
        if isinstance(value, Tensor):
            found += [Place.of(Read(place, "stride", axis), stride) for axis, stride in _symbolic(value.stride())]
    return found


def conditions_of(inputs: Sequence[Place], env: Any) -> tuple[Expression, ...] | None:
    """The guards on symbolic numbers, as conditions on inputs; None where there are no symbols."""
    places: dict[str, Read] = {}
    conditions: dict[Expression, None] = {}
    derived: list[Place] = []
    for place in inputs:
        if place.expression.is_symbol and str(place.expression) not in places:
            places[str(place.expression)] = place.read
        else:
            derived.append(place)
    if not places:
        return None
    try:
        conditions |= dict.fromkeys(
            Operation("==", (place.read, _on_places(place.expression, places))) for place in derived
        )
        conditions |= dict.fromkeys(_on_places(guard.expr, places) for guard in env.guards)
    except ExpressionError:
        # A guard that cannot be expressed is known to hold for the sizes of this call only.
        exact = [(places[symbol], value) for symbol, value in _values(env) if symbol in places]
        exact += [(place.read, place.hint) for place in derived if place.hint is not None]
        conditions |= dict.fromkeys(Operation("==", (found, int(value))) for found, value in exact)
    conditions |= dict.fromkeys(_bounds(env, places))
    return tuple(conditions)


def check_from(conditions: Sequence[Expression]) -> Check:
    """A function that checks the conditions of `conditions_of`; one that has no value, as `n % 0`, does not hold."""
    holds = evaluator(Operation("and", tuple(conditions)), functions_of_conditions())

    def check(inputs: Sequence[Any]) -> bool:
        try:
            return bool(holds(inputs))
        except ArithmeticError:
            return False

    return check


def _symbolic(numbers: Iterable[Any]) -> Iterator[tuple[int, torch.SymInt]]:
    return ((axis, number) for axis, number in enumerate(numbers) if isinstance(number, torch.SymInt))


def _on_places(expression: Any, places: dict[str, Read]) -> Expression:
    """A condition on the inputs; raises where a symbol belongs to no input."""
    placed = symbolic_expression(expression, places)
    evaluator(placed, functions_of_conditions())
    return placed


def _bounds(env: Any, places: dict[str, Read]) -> Iterator[Expression]:
    for symbol, allowed in env.var_to_range.items():
        found = places.get(str(symbol))
        if found is not None and allowed.lower.is_Integer:
            yield Operation(">=", (found, int(allowed.lower)))
        if found is not None and allowed.upper.is_Integer:
            yield Operation("<=", (found, int(allowed.upper)))


def _values(env: Any) -> Iterator[tuple[str, Any]]:
    values = getattr(env, "backed_var_to_val", None) or env.var_to_val  # torch 2.11 has the second name only.
    return ((str(symbol), value) for symbol, value in values.items())
