"""Tags for the nodes that a tracer writes down while a body runs: what a partitioner of joint graphs reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch.fx.traceback as fx_traceback
from torch._higher_order_ops import wrap
from torch.fx import Interpreter, Node
from torch.utils.checkpoint import CheckpointPolicy

__all__ = ["SAVED", "TaggedInterpreter", "next_graph_id", "node_tags", "saving", "tagging"]

#: Dynamo leaves the code of this module to Python: it runs around bodies, of which a break has ended the graph.
DYNAMO_SKIPS = True


#: The tag of what is saved for the backward.
SAVED = {"recompute": CheckpointPolicy.MUST_SAVE}

_TAGS: ContextVar[Mapping[str, Any] | None] = ContextVar("node_tags", default=None)
_SAVED: ContextVar[Collection[Node]] = ContextVar("saved_nodes", default=())


def next_graph_id() -> int:
    """A number for a region, larger than every one before: torch compares them, and draws its own from here too."""
    return int(next(wrap.uid))


def node_tags() -> Mapping[str, Any] | None:
    """The tags for what is traced now; None where nothing is tagged."""
    return _TAGS.get()


@contextmanager
def tagging(tags: Mapping[str, Any]) -> Iterator[None]:
    """Nodes that are traced inside carry these tags, beside those from around."""
    token = _TAGS.set({**(_TAGS.get() or {}), **tags})
    try:
        with fx_traceback.preserve_node_meta():  # What it puts back is a copy from before the tags.
            fx_traceback.get_current_meta().update(tags)
            yield
    finally:
        _TAGS.reset(token)


@contextmanager
def saving(nodes: Collection[Node]) -> Iterator[None]:
    """Where a graph with these nodes runs inside, what is traced for them is saved."""
    token = _SAVED.set(nodes)
    try:
        yield
    finally:
        _SAVED.reset(token)


class TaggedInterpreter(Interpreter):
    """Runs a graph node by node; what a tracer writes down for a node has its metadata and the tags."""

    def run_node(self, n: Node) -> Any:
        with tagging(SAVED) if n in _SAVED.get() else nullcontext():
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        _tag_current()
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        _tag_current()
        return super().call_method(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        _tag_current()
        return super().call_module(target, args, kwargs)


def _tag_current() -> None:
    """Adds the tags to what stands for the metadata of the node that runs: a copy, if the node has any."""
    tags = _TAGS.get()
    if tags:
        fx_traceback.get_current_meta().update(tags)
