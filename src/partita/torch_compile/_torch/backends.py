"""Dynamo's part of a backend: other backends by name, tracing contexts, sources of inputs.

Dynamo is only imported when one of these functions runs, so that `import partita` stays quick.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.operator_schemas import storage_key
from partita._torch.symbolic_shapes import symbol_of, symbols_in


def find_backend(name: str) -> Callable[..., Any] | None:
    """The backend that torch.compile knows under this name, or None."""
    if name not in backend_names():
        return None
    from torch._dynamo.backends.registry import lookup_backend

    backend: Callable[..., Any] = lookup_backend(name)
    return backend


def backend_names() -> list[str]:
    """The names of all backends that torch.compile knows."""
    return list(torch.compiler.list_backends(exclude_tags=()))


def trace_again_with_constants(floats: Sequence[str]) -> None:
    """Ends the compilation, if there are any of these symbols, and lets Dynamo trace the frame with their values."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    new = [name for name in floats if not TensorifyState.should_specialize(name)]
    for name in new:
        TensorifyState.specialize(name)
    if new:
        raise TensorifyScalarRestartAnalysis


@contextmanager
def without_tracing_for_others(numbers: Collection[str], body: GraphModule) -> Iterator[None]:
    """Inside, the compiler of a body does not have Dynamo trace the frame again because of numbers it does not read.

    AOTAutograd (torch 2.13) takes every known number of double precision that is not in its graph for a float argument
    of which it could not make a tensor. Dynamo would then make a constant of an argument that only another part of the
    graph reads, and drop in-place calls on a tensor without dimensions whose results are unused.
    """
    from torch._dynamo.symbolic_convert import TensorifyState

    read = {str(symbol) for value in _values_in(body) for symbol in symbols_in(value)}
    new = {name for name in numbers if name not in read and not TensorifyState.should_specialize(name)}
    TensorifyState.force_specializations.update(new)
    try:
        yield
    finally:
        TensorifyState.force_specializations.difference_update(new)


def _values_in(body: GraphModule) -> Iterator[Any]:
    """The traced values of a body and of the bodies in it."""
    graphs = (module.graph for module in body.modules() if isinstance(module, GraphModule))
    return (node.meta.get("example_value") for graph in graphs for node in graph.nodes)


def numbers_of(gm: GraphModule) -> frozenset[str]:
    """The symbols of the numbers among the inputs of Dynamo's graph: tensors that hold one double each."""
    inputs = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    memos = (getattr(value, "item_memo", None) for value in inputs)
    symbols = (symbol_of(memo) for memo in memos if isinstance(memo, torch.SymFloat))
    return frozenset(str(symbol) for symbol in symbols if symbol is not None)


def reset_with_dynamo(backend: Callable[..., Any]) -> None:
    """Has the next `torch.compiler.reset()` call `backend.reset`.

    torch 2.13 notes a backend when torch.compile is called and forgets it at a reset, while functions that were made
    before it still compile with that backend.
    """
    from torch._dynamo.eval_frame import cached_backends

    cached_backends.setdefault(id(backend), backend)


def no_recompute_without_backward(root: GraphModule) -> AbstractContextManager[None]:
    """Inside, AOTAutograd ignores marks for recomputation in graphs for which it finds no backward.

    Its pass for these serves graphs in which Dynamo has traced the backward too, and refuses marked random operators in
    all others (torch 2.13).
    """
    from functorch.compile import config as settings

    option = "remat_using_tags_for_fwd_loss_bwd_graph"
    traces_backward = any(
        node.target in _BACKWARD or (node.meta.get("custom") or {}).get("phase") == "backward"
        for node in root.graph.nodes
    )
    if traces_backward or not hasattr(settings, option):
        return nullcontext()
    patched: AbstractContextManager[None] = settings.patch({option: False})
    return patched


_BACKWARD = (torch.autograd.grad, torch.autograd.backward)


@contextmanager
def own_tracing_context(mode: Any) -> Iterator[None]:
    """A copy of the current tracing context, so that what AOTAutograd records on it is not shared.

    A backward is compiled when it first runs, from the context that its forward was compiled in. With a shared context
    every piece of a graph would find the records of the last piece.
    """
    from torch._guards import TracingContext, tracing

    current = TracingContext.try_get()
    context = TracingContext(mode) if current is None else copy.copy(current)
    context.fake_mode = mode
    with tracing(context):
        yield


@contextmanager
def apart_from_buckets() -> Iterator[None]:
    """Inside, DDP's compiler does not see what is compiled: it takes the graph of a bucket for one that is not.

    It (torch 2.13) counts the graphs that AOTAutograd has compiled. If a bucket has added some, it takes them for one,
    wants what is recorded of that, and has the first call of it return fake tensors, which fails for a bucket of
    several pieces. Otherwise it runs the graph of the bucket on fake tensors.
    """
    from torch._dynamo.utils import counters
    from torch._guards import TracingContext, tracing

    current: Any = TracingContext.try_get()
    if getattr(current, "ddp_optimizer_ctx", None) is None:
        yield
        return
    context, counts = copy.copy(current), counters["aot_autograd"]
    context.ddp_optimizer_ctx, context.fakify_first_call = None, False
    before = counts["total"]
    try:
        with tracing(context):
            yield
    finally:
        counts["total"] = before


def without_disabling(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compiler.disable` wraps: pieces are called by a function that Dynamo has disabled already."""
    wrapped: Callable[..., Any] = getattr(function, "__wrapped__", function)
    return wrapped if getattr(function, "_torchdynamo_disable", False) else function


def sources_of(root: GraphModule) -> list[Any]:
    """The Dynamo source of each input of the graph, its place in the user's frame; None where that is unknown."""
    placeholders: list[Node] = root.graph.find_nodes(op="placeholder")
    return [getattr(node, "_dynamo_source", None) for node in placeholders]


def adopt_origin(body: GraphModule, root: GraphModule, *, sources: Sequence[Any], args: Sequence[Any]) -> None:
    """Marks `body` as a part of Dynamo's graph `root`; its compiler then knows which inputs have static addresses.

    Sources are omitted where they could do harm: torch 2.13 fails on mutated arguments that are one tensor (the dedupe
    wrapper of AOTAutograd), and without sources it guards overlaps by sizes. They must be complete, so a body with
    state of its own gets none.
    """
    body.meta.update(root.meta)
    has_state = any(True for _ in (*body.parameters(), *body.buffers()))
    if has_state or not hasattr(root, "_param_name_to_source") or _may_alias(args):
        return
    body._param_name_to_source = root._param_name_to_source
    placeholders: list[Any] = body.graph.find_nodes(op="placeholder")
    for node, source in zip(placeholders, sources, strict=True):
        node._dynamo_source = source


def _may_alias(args: Sequence[Any]) -> bool:
    keys = [storage_key(arg) for arg in args if isinstance(arg, torch.Tensor)]
    return len(set(keys)) < len(keys)
