"""Every node that torch's tracer writes: the modes that were really in force, and the tensors that it has just met."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from partita._torch.ambient import read_ambient
from partita._torch.capture_recorder import Seen, current_recorder
from partita._torch.capture_swaps import Swap

__all__ = ["node_swaps"]


def node_swaps() -> list[Swap]:
    """The method by which torch's tracer writes a node, which tells the recorder."""
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    original = vars(PythonKeyTracer)["create_node"]

    @wraps(original)
    def create_node(tracer: Any, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        node = original(tracer, kind, target, *args, **kwargs)
        recorder = current_recorder()
        if recorder is not None:
            recorder.seen[node] = _seen()
            if kind == "get_attr":
                recorder.constants.meet(node, getattr(tracer.root, target, None))
            else:
                recorder.constants.pass_on(node)
        return node

    return [Swap(PythonKeyTracer, "create_node", create_node)]


def _seen() -> Seen:
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    if torch._C._is_any_autocast_enabled():
        autocast = tuple((device, dtype) for device, enabled, dtype in read_ambient().autocast if enabled)
    return Seen(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)
