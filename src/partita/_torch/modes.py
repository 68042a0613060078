"""The modes of the thread: grad, inference and autocast, read, set and restored; and whether a tracer records."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch._ops import _get_current_dispatch_mode_pre_dispatch
from torch.autograd import forward_ad
from torch.fx import Interpreter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from partita._torch.functorch import close_levels, count_levels

#: Dynamo does not trace the code of this module: it runs around bodies, after a graph break.
DYNAMO_SKIPS = True


_Value = TypeVar("_Value")


@contextmanager
def variable_set(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Inside, a context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@cache
def initial_modes() -> Ambient:
    """The modes that every thread starts with."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(read_ambient).result()


@contextmanager
def fresh_modes(*, grad: bool) -> Iterator[None]:
    """Inside, inference mode and autocast are off, and the grad mode is `grad`; all modes are restored afterwards."""
    found = read_ambient()
    with ExitStack() as stack:
        if found.inference:
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.callback(restore_autocast, found)
        restore_autocast(initial_modes())
        yield


@cache
def would_autocast(device: str, dtype: torch.dtype | None) -> bool:
    """Whether a block for this device and dtype casts here; torch disables a block that the device does not support."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast(device, dtype):
            return _is_autocast_enabled(device)


#: Bound at import: while a model is captured, these functions of torch are patched.
_GUARD = torch._C._InferenceMode
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled
_is_autocast_cache_enabled = torch.is_autocast_cache_enabled
_is_inference_mode_enabled = torch.is_inference_mode_enabled
_get_autocast_dtype = torch.get_autocast_dtype

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "maia", "privateuseone")


@dataclass(frozen=True, slots=True)
class Ambient:
    """The modes of this thread at one moment."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    autocast_depth: int
    #: Levels of torch.func transforms; an operator inside one may run its body one level lower, in the same modes.
    levels: int = field(compare=False)


def read_ambient() -> Ambient:
    """The modes that the next operator would run under."""
    return Ambient(
        grad=_is_grad_enabled(),
        inference=_is_inference_mode_enabled(),
        autocast=tuple(
            (device, _is_autocast_enabled(device), _get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES
        ),
        autocast_cache=_is_autocast_cache_enabled(),
        autocast_depth=_autocast_depth(),
        levels=count_levels(),
    )


def enabled_autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """The device types for which autocast is on, each with its dtype."""
    return tuple((device, _get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES if _is_autocast_enabled(device))


def can_autocast(device_type: str) -> bool:
    """Whether torch has autocast for a type of devices."""
    try:
        return torch.amp.is_autocast_available(device_type)
    except RuntimeError:  # It is no type of devices at all.
        return False


def restore_autocast(found: Ambient) -> None:
    """Restores the autocast state of every device, the cache flag and the depth of nesting."""
    for device, enabled, dtype in found.autocast:
        if (_is_autocast_enabled(device), _get_autocast_dtype(device)) != (enabled, dtype):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(found.autocast_cache)
    depth = _autocast_depth()
    for _ in range(depth - found.autocast_depth):
        torch.autocast_decrement_nesting()
    for _ in range(found.autocast_depth - depth):
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


def restore_after_error(found: Ambient, error: BaseException) -> None:
    """Restores the modes in `found` after `error` has left a graph with its own still set."""
    close_levels(found.levels)
    # The guards of open inference blocks live in the frames that raised. Each restores all modes as it found them, so
    # the innermost goes first.
    for guard in reversed(_open_guards(error.__traceback__)):
        guard.__exit__(None, None, None)
    # Where a graph module has dropped its frames, the guards were destroyed in the order in which they were made.
    if _is_inference_mode_enabled() != found.inference:
        _set_inference(found.inference)
    torch.set_grad_enabled(found.grad)
    restore_autocast(found)


@contextmanager
def ambient_kept() -> Iterator[None]:
    """Restores the modes that a graph leaves switched, since a run on fakes must have no side effects."""
    ambient = read_ambient()
    try:
        yield
    except BaseException as error:
        restore_after_error(ambient, error)
        raise
    torch.set_grad_enabled(ambient.grad)
    restore_autocast(ambient)


def _open_guards(raised: TracebackType | None) -> list[Any]:
    """The guards of inference blocks in the frames that an exception came through, in the order they were entered."""
    guards: dict[int, Any] = {}
    # The first frame is that of the caller.
    for frame, _ in traceback.walk_tb(None if raised is None else raised.tb_next):
        for value in list(frame.f_locals.values()):
            held = value.env.values() if isinstance(value, Interpreter) else (value,)
            guards |= {id(guard): guard for guard in held if isinstance(guard, _GUARD)}
    return list(guards.values())


def _set_inference(enabled: bool) -> None:  # noqa: FBT001
    """Sets inference mode without a scope: torch only has guards, and the second restores what the first has set."""
    first, second = _GUARD(enabled), _GUARD(enabled)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)


def _autocast_depth() -> int:
    """How many autocast blocks are open; torch only returns the count when it changes."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def in_forward_mode() -> bool:
    """Whether a level of forward-mode AD is open, in which tensors may have tangents."""
    return forward_ad._current_level >= 0


# Whether a tracer records what runs, and of which kind.


class Tracing(Enum):
    """What kind of tracer records a body that runs."""

    #: None: the body runs for its values.
    NOT = auto()
    #: A tracer that records the operators inside, but not the mode around them.
    OPEN = auto()
    #: A tracer that records the call, with its mode and its body.
    KEPT = auto()


def tracing_now() -> Tracing:
    """Whether torch.export, `make_fx` or AOTAutograd traces this."""
    if torch.compiler.is_exporting():
        return Tracing.OPEN
    if any(_tracers()):
        return Tracing.OPEN
    before_dispatch = torch._C._dispatch_tls_is_dispatch_key_included(torch.DispatchKey.PreDispatch)
    is_traced = before_dispatch and _get_current_dispatch_mode_pre_dispatch() is not None
    return Tracing.OPEN if is_traced else Tracing.NOT


def traces_after_dispatch() -> bool:
    """Whether `make_fx` traces below dispatch, without functionalization."""
    if torch.compiler.is_exporting():
        return False
    writes_nodes, functionalizes = _tracers()
    is_functionalized = torch._C._dispatch_tls_is_dispatch_key_included(torch.DispatchKey.Functionalize)
    return writes_nodes and not functionalizes and not is_functionalized


def _tracers() -> tuple[bool, bool]:
    """Whether a dispatch mode writes a graph, and whether one functionalizes."""
    modes = _get_current_dispatch_mode_stack()
    if not modes:
        return False, False
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    kinds = (ProxyTorchDispatchMode, FunctionalTensorMode)
    writes_nodes, functionalizes = (any(isinstance(mode, kind) for mode in modes) for kind in kinds)
    return writes_nodes, functionalizes
