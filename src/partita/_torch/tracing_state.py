"""Whether what runs now is being written down by a tracer, and how."""

from __future__ import annotations

from enum import Enum, auto

import torch
from torch._C import _TorchDispatchModeKey
from torch._ops import _len_torch_dispatch_stack_pre_dispatch

__all__ = ["Tracing", "traces_after_dispatch", "tracing_now"]


class Tracing(Enum):
    """Who watches a body run."""

    #: Nobody: the values matter.
    NOT = auto()
    #: A tracer that writes down the operators inside, and nothing of the mode around them.
    OPEN = auto()
    #: A tracer that writes down the call, with its mode, and the body beside it.
    KEPT = auto()


def tracing_now() -> Tracing:
    """Whether torch.export, `make_fx` or AOTAutograd runs this to see what it does."""
    if torch.compiler.is_exporting():
        return Tracing.OPEN
    if torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACERS)):
        return Tracing.OPEN
    before_dispatch = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
    return Tracing.OPEN if before_dispatch and _len_torch_dispatch_stack_pre_dispatch() > 0 else Tracing.NOT


def traces_after_dispatch() -> bool:
    """Whether `make_fx` writes down what runs, after dispatch, and nothing functionalizes it first."""
    if torch.compiler.is_exporting() or torch._C._len_torch_dispatch_stack() == 0:
        return False
    proxies, functional = map(torch._C._get_dispatch_mode, _TRACERS)
    is_functionalized = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Functionalize)
    return proxies is not None and functional is None and not is_functionalized


_TRACERS = (_TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FUNCTIONAL)
