"""Calls in a trace: the body as a graph of its own beside the graph that calls it, closed over nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.utils import reenter_make_fx
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import py_sym_types, set_meta, track_tensor_tree
from torch.utils import _pytree as pytree

from partita._torch.body_inputs import FreeSymbols, lift_tensors
from partita._torch.body_runs import run
from partita._torch.unread_nodes import keep_unread_nodes

__all__ = ["KeptCall", "trace_call"]


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call as the graph keeps it: the operator, what comes before the body, keywords, and metadata of the body."""

    operator: Any
    mode: Sequence[Any]
    keywords: Mapping[str, Any]
    metadata: Mapping[str, Any]


def trace_call(
    tracer: Any,
    kept: KeptCall,
    *,
    body: Callable[..., Any],
    scope: AbstractContextManager[Any],
    operands: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> Any:
    """What `body` gives, with one call of the operator in the graph of `tracer`.

    The body runs once. In the graph its inputs and outputs are flat and without constants: a body can then be saved,
    inlined and called whatever containers the caller used. Tensors and sizes that it found outside become inputs too.
    """
    flat = _FlatBody(body, operands, keywords, tracer)
    with scope:
        traced: GraphModule = reenter_make_fx(flat)(*flat.inputs)
    inputs = (*flat.inputs, *flat.symbols.used, *lift_tensors(traced, tracer))
    outputs = flat.outputs if flat.has_outputs else _give_an_input(traced, inputs)
    traced.recompile()
    keep_unread_nodes(traced.graph)
    _note_missing_values(traced)
    traced.meta.update(kept.metadata)
    operator = kept.operator
    name = tracer.get_fresh_qualname(f"{operator.name()}_body_")
    tracer.root.register_module(name, traced)
    args = pytree.tree_map(tracer.unwrap_proxy, (*kept.mode, traced, *inputs))
    call = tracer.create_proxy("call_function", operator, args, dict(kept.keywords), name=operator.name())
    if flat.has_outputs:
        _announce_symbols(traced, outputs)
        track_tensor_tree(outputs, call, constant=None, tracer=tracer)
    else:
        set_meta(call, outputs)
    return flat.result


class _FlatBody:
    """A body as a function from the traced leaves of its arguments to those of its result, which it keeps."""

    def __init__(
        self, body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any], outer: Any
    ) -> None:
        self._body = body
        self._outer = outer
        self._leaves, self._structure = pytree.tree_flatten((operands, dict(keywords)))
        self.inputs = tuple(filter(_is_traced, self._leaves))
        self.symbols = FreeSymbols()
        self.result: Any = None
        self.outputs: Any = ()

    @property
    def has_outputs(self) -> bool:
        return not isinstance(self.outputs, tuple) or bool(self.outputs)

    def __call__(self, *inputs: Any) -> Any:
        self.symbols.offer(self._outer)
        given = iter(inputs)
        leaves = [next(given) if _is_traced(leaf) else leaf for leaf in self._leaves]
        operands, keywords = pytree.tree_unflatten(leaves, self._structure)
        self.result = run(self._body, operands, keywords)
        self.outputs = self.result
        if not _is_traced(self.result):
            self.outputs = tuple(filter(_is_traced, pytree.tree_leaves(self.result)))
        return self.outputs


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, _TRACED)


def _give_an_input(traced: GraphModule, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Makes a body that only writes return a tensor that it is given: torch 2.13 cannot load a call without outputs."""
    placeholders = traced.graph.find_nodes(op="placeholder")
    pairs = [pair for pair in zip(placeholders, inputs, strict=True) if isinstance(pair[1], Tensor)][:1]
    traced.graph.output_node().args = (tuple(node for node, _ in pairs),)
    return tuple(tensor for _, tensor in pairs)


def _note_missing_values(traced: GraphModule) -> None:
    """Gives every call a traced value: torch does so for a whole program, but not in bodies (vmap and jvp, 2.13)."""
    for node in traced.graph.nodes:
        if node.op == "call_function" and not isinstance(node.target, OpOverload):
            node.meta.setdefault("val", None)


def _announce_symbols(traced: GraphModule, outputs: Any) -> None:
    """Lets the call bind the data-dependent sizes that its body gives out, as their first owner in this graph."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    env = None if mode is None else mode.shape_env
    if env is None:
        return
    bound = {symbol for node in traced.graph.nodes for symbol in node.meta.get("unbacked_bindings") or ()}
    if bound:
        given = free_unbacked_symbols(pytree.tree_leaves(outputs))
        env.pending_fresh_unbacked_symbols.extend(sorted(bound & given, key=str))


_TRACED = (Tensor, *py_sym_types, torch.ScriptObject, FakeScriptObject)
