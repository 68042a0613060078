"""What a traced body finds outside of itself, tensors and symbolic sizes, as inputs of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_meta, set_proxy_slot
from torch.utils._thunk import Thunk

__all__ = ["FreeSymbols", "lift_tensors"]


class FreeSymbols:
    """The symbolic sizes of an outer trace that a body uses though none of its operands has them, in order of use."""

    def __init__(self) -> None:
        self.used: list[Any] = []

    def offer(self, outer: Any) -> None:
        """Lets the trace that is running now take any size that `outer` knows; it becomes an input once it is used."""
        tracing = get_proxy_mode()
        if tracing is None:
            return
        inner: Any = tracing.tracer
        for symbol, known in list(outer.sympy_expr_tracker.items()):
            if symbol not in inner.sympy_expr_tracker:
                set_proxy_slot(known.value, inner, Thunk(partial(self._take, inner, known.value)))

    def _take(self, tracer: Any, size: Any) -> Proxy:
        self.used.append(size)
        node = _append_input(tracer.graph, "size")
        proxy: Proxy = tracer.proxy(node)
        set_meta(proxy, size)
        return proxy


def lift_tensors(traced: GraphModule, outer: Any) -> list[Tensor]:
    """Makes inputs of the tensors that `traced` holds, and returns them as the outer trace knows them."""
    lifted: dict[str, Node] = {}
    tensors: list[Tensor] = []
    for node in traced.graph.find_nodes(op="get_attr"):
        target = str(node.target)
        held = getattr(traced, target, None)
        if isinstance(held, Tensor):
            if target not in lifted:
                lifted[target] = _append_input(traced.graph, target.strip("_"))
                _describe(lifted[target], node, held, outer)
                tensors.append(held)
            node.replace_all_uses_with(lifted[target])
            traced.graph.erase_node(node)
    for target in lifted:
        delattr(traced, target)
    return tensors


def _append_input(graph: Graph, name: str) -> Node:
    """A new last placeholder."""
    rest = next((node for node in graph.nodes if node.op != "placeholder"), None)
    if rest is None:
        return graph.placeholder(name)
    with graph.inserting_before(rest):
        return graph.placeholder(name)


def _describe(placeholder: Node, attribute: Node, held: Tensor, outer: Any) -> None:
    """Gives the input what is known of the tensor: by its own trace, by the outer one, or by the fake mode in force."""
    placeholder.meta.update(attribute.meta)
    known = get_proxy_slot(held, outer, None)
    value = _fake(held) if known is None else known.proxy.node.meta.get("val")
    if value is not None:
        placeholder.meta.setdefault("val", value)


def _fake(tensor: Tensor) -> Tensor | None:
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is None or isinstance(tensor, FakeTensor):
        return tensor if isinstance(tensor, FakeTensor) else None
    fake: Tensor = mode.from_tensor(tensor, static_shapes=True)
    return fake
