"""Other backends by name, tracing contexts, sources of inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.operators.schemas import storage_key

__all__ = ["adopt_origin", "backend_names", "find_backend", "own_tracing_context", "sources_of"]


# What a compiler backend needs from Dynamo: other backends by name, and a tracing context for each of its graphs.
#
# Dynamo is only imported when one of these functions runs, so that `import partita` stays quick.


def find_backend(name: str) -> Callable[..., Any] | None:
    """The backend that torch.compile knows under this name, or None."""
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        backend: Callable[..., Any] = lookup_backend(name)
    except InvalidBackend:
        return None
    return backend


def backend_names() -> list[str]:
    """The names of all backends that torch.compile knows."""
    from torch._dynamo.backends.registry import list_backends

    return list(list_backends(exclude_tags=()))


@contextmanager
def own_tracing_context(mode: Any) -> Iterator[None]:
    """A tracing context like the one in force, but for what AOTAutograd writes on it.

    A backward is compiled when it first runs, from the context that its forward was compiled in. Were the context
    shared, the pieces of one graph would find the records of the last of them there.
    """
    from torch._guards import TracingContext, tracing

    found = TracingContext.try_get()
    context = TracingContext(mode) if found is None else copy.copy(found)
    context.fake_mode = mode
    with tracing(context):
        yield


# Origin: what Dynamo notes on its graph, beside the metadata, about where the graph and its inputs come from.


def sources_of(root: GraphModule) -> list[Any]:
    """Where in the user's frame each input of Dynamo's graph is found; None where that is unknown."""
    placeholders: list[Node] = root.graph.find_nodes(op="placeholder")
    return [getattr(node, "_dynamo_source", None) for node in placeholders]


def adopt_origin(body: GraphModule, root: GraphModule, *, sources: Sequence[Any], args: Sequence[Any]) -> None:
    """Marks `body` as a part of Dynamo's graph `root`; its compiler then sees which inputs never move.

    Sources are left out where they could do harm: torch 2.13 fails on written arguments that are one tensor (the dedupe
    wrapper of AOTAutograd), and without sources it guards overlaps by sizes. They must be complete, so a body that has
    state of its own goes without them.
    """
    body.meta.update(root.meta)
    has_state = any(True for _ in (*body.parameters(), *body.buffers()))
    if has_state or not hasattr(root, "_param_name_to_source") or _may_share_memory(args):
        return
    body._param_name_to_source = root._param_name_to_source
    placeholders: list[Any] = body.graph.find_nodes(op="placeholder")
    for node, source in zip(placeholders, sources, strict=True):
        node._dynamo_source = source


def _may_share_memory(args: Sequence[Any]) -> bool:
    keys = [storage_key(arg) for arg in args if isinstance(arg, torch.Tensor)]
    return len(set(keys)) < len(keys)
