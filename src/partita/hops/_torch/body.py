"""Running and tracing the body of a higher-order operator."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._higher_order_ops.utils import reenter_make_fx
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    py_sym_types,
    set_meta,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.fx.traceback import has_preserved_node_meta
from torch.utils import _pytree as pytree

from partita._torch.fake_tensors import active_fake_mode, fake_mode_of
from partita._torch.fx.lazy_graph_module import exempt_from_dce
from partita._torch.modes import read_ambient, restore_after_error
from partita._torch.nn_modules import runs_its_graph
from partita._torch.operator_schemas import nodes_by_target
from partita._torch.pytrees import leaves_of, map_leaves
from partita.hops._torch.node_tags import TaggedInterpreter

#: Dynamo must not compile the code of this module, which runs around a body after a graph break inside it.
DYNAMO_SKIPS = True


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call in a graph: the operator, its arguments before the body, keywords, and metadata of the body."""

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
    """The result of `body`, with one call of the operator in the graph of `tracer`.

    The body runs once, and becomes a graph of its own that closes over nothing: tensors and sizes that it captured
    become inputs. Its inputs and outputs are flat and without constants, so that it can be saved, inlined and called
    whatever containers the caller used.
    """
    flat = _FlatBody(body, operands, keywords, tracer)
    with scope:
        traced: GraphModule = reenter_make_fx(flat)(*flat.inputs)
    inputs = (*flat.inputs, *flat.symbols.used, *lift_tensors(traced, tracer))
    outputs = flat.outputs if flat.has_outputs else _return_an_input(traced, inputs)
    traced.recompile()
    exempt_from_dce(traced.graph)
    _fill_missing_values(traced)
    traced.meta.update(kept.metadata)
    operator = kept.operator
    name = tracer.get_fresh_qualname(f"{operator.name()}_body_")
    tracer.root.register_module(name, traced)
    args = map_leaves(tracer.unwrap_proxy, (*kept.mode, traced, *inputs))
    call = tracer.create_proxy("call_function", operator, args, dict(kept.keywords), name=operator.name())
    if flat.has_outputs:
        _bind_unbacked_symbols(traced, outputs)
        track_tensor_tree(outputs, call, constant=None, tracer=tracer)
    else:
        set_meta(call, outputs)
    return flat.result


class _FlatBody:
    """A body as a function from the traced leaves of its arguments to those of its result; keeps the result."""

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
        remaining = iter(inputs)
        leaves = [next(remaining) if _is_traced(leaf) else leaf for leaf in self._leaves]
        operands, keywords = self._structure.unflatten(leaves)
        self.result = run(self._body, operands, keywords)
        self.outputs = self.result
        if not _is_traced(self.result):
            self.outputs = tuple(filter(_is_traced, leaves_of(self.result)))
        return self.outputs


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, _TRACED)


def _return_an_input(traced: GraphModule, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Makes a body without results return one of its inputs: torch 2.13 cannot load a call without outputs."""
    placeholders = traced.graph.find_nodes(op="placeholder")
    pairs = [pair for pair in zip(placeholders, inputs, strict=True) if isinstance(pair[1], Tensor)][:1]
    traced.graph.output_node().args = (tuple(node for node, _ in pairs),)
    return tuple(tensor for _, tensor in pairs)


def _fill_missing_values(traced: GraphModule) -> None:
    """Sets `val` on calls that lack it: torch does so at top level, but not in bodies (vmap and jvp, 2.13)."""
    for node in traced.graph.nodes:
        if node.op == "call_function" and not isinstance(node.target, OpOverload):
            node.meta.setdefault("val", None)


def _bind_unbacked_symbols(traced: GraphModule, outputs: Any) -> None:
    """Lets the call bind the unbacked symbols in the outputs of its body, as their first owner in this graph."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    mode = active_fake_mode()
    env = None if mode is None else mode.shape_env
    if env is None:
        return
    bound = {symbol for node in traced.graph.nodes for symbol in node.meta.get("unbacked_bindings") or ()}
    if bound:
        returned = free_unbacked_symbols(leaves_of(outputs))
        env.pending_fresh_unbacked_symbols.extend(sorted(bound & returned, key=str))


_TRACED = (Tensor, *py_sym_types, torch.ScriptObject, FakeScriptObject)


class FreeSymbols:
    """The symbolic sizes of the outer trace that a body uses but none of its operands has, in order of use."""

    def __init__(self) -> None:
        self.used: list[Any] = []

    def offer(self, outer: Any) -> None:
        """Makes all sizes that `outer` knows available to the current trace; a size becomes an input on first use."""
        tracing = get_proxy_mode()
        if tracing is None:
            return
        inner: Any = tracing.tracer
        for symbol, known in list(outer.sympy_expr_tracker.items()):
            if symbol not in inner.sympy_expr_tracker:
                read: Any = _OnFirstUse(partial(self._take, inner, known.value))
                set_proxy_slot(known.value, inner, read)

    def _take(self, tracer: Any, size: Any) -> Proxy:
        self.used.append(size)
        node = _append_input(tracer.graph, "size")
        proxy: Proxy = tracer.proxy(node)
        set_meta(proxy, size)
        return proxy


class _OnFirstUse:
    """The proxy of a symbolic size, made when a tracer first asks for it, which it does by `force`."""

    def __init__(self, make: Callable[[], Proxy]) -> None:
        self.force = cache(make)


def lift_tensors(traced: GraphModule, outer: Any) -> list[Tensor]:
    """Turns the tensor attributes of `traced` into inputs, and returns these tensors."""
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
    """Copies metadata to a new input: from its own trace, from the outer one, or from the active fake mode."""
    placeholder.meta.update(attribute.meta)
    known = get_proxy_slot(held, outer, None)
    value = _fake(held) if known is None else known.proxy.node.meta.get("val")
    if value is not None:
        placeholder.meta.setdefault("val", value)


def _fake(tensor: Tensor) -> Tensor | None:
    if fake_mode_of(tensor) is not None:
        return tensor
    mode = active_fake_mode()
    if mode is None:
        return None
    fake: Tensor = mode.from_tensor(tensor, static_shapes=True)
    return fake


#: Python functions that call no user code when their arguments are tensors and numbers.
_PLAIN_FUNCTIONS = frozenset(
    getattr(module, name) for module in (operator, math) for name in dir(module) if callable(getattr(module, name))
) - {operator.call}


def run_body(
    scope: AbstractContextManager[Any], body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Any:
    """The result of `body` in `scope`; if it raises, all modes are restored."""
    if _switches_nothing(body):
        with scope:
            return run(body, operands, keywords)
    with scope:
        # Inside the scope: a mode that the body has left switched must be restored before the scope is exited.
        ambient = read_ambient()
        try:
            return run(body, operands, keywords)
        except BaseException as error:
            restore_after_error(ambient, error)
            raise


def run(body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The result of `body`; runs it node by node where a tracer copies node metadata, as torch does at top level."""
    if has_preserved_node_meta() and not keywords and runs_its_graph(body):
        return TaggedInterpreter(cast(GraphModule, body)).run(*operands)
    return body(*operands, **keywords)


def _switches_nothing(body: Any) -> bool:
    """Whether `body` is a graph in which no node can leave a mode switched."""
    return runs_its_graph(body) and all(
        op in ("placeholder", "get_attr", "output") or (op == "call_function" and _is_plain(target)) or not nodes
        for (op, target), nodes in nodes_by_target(body.graph).items()
    )


def _is_plain(target: Any) -> bool:
    """Whether a function is an ATen or Python builtin; any other may run Python code, or a body."""
    return target.namespace in ("aten", "prims") if isinstance(target, OpOverload) else target in _PLAIN_FUNCTIONS
