"""Tags for the nodes that are traced while a body runs, for partitioners of joint graphs: what to save or recompute."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch.fx.traceback as fx_traceback
from torch._higher_order_ops import wrap
from torch.fx import Interpreter, Node
from torch.utils.checkpoint import CheckpointPolicy

from partita._torch.modes import variable_set

#: Dynamo must not compile the code of this module, which runs around a body after a graph break inside it.
DYNAMO_SKIPS = True


#: The tag of nodes whose results are saved for backward.
SAVED = {"recompute": CheckpointPolicy.MUST_SAVE}

_TAGS: ContextVar[Mapping[str, Any] | None] = ContextVar("node_tags", default=None)
_SAVED: ContextVar[Collection[Node]] = ContextVar("saved_nodes", default=())


def next_graph_id() -> int:
    """A number for a region, larger than all before: torch compares them, and takes its own from the same counter."""
    return int(next(wrap.uid))


def node_tags() -> Mapping[str, Any] | None:
    """The tags of the nodes that are traced now; None where nodes are not tagged."""
    return _TAGS.get()


@contextmanager
def tagging(tags: Mapping[str, Any]) -> Iterator[None]:
    """Nodes that are traced inside carry these tags, in addition to the outer ones."""
    # Preserving restores a copy of the metadata from before the tags.
    with variable_set(_TAGS, {**(_TAGS.get() or {}), **tags}), fx_traceback.preserve_node_meta():
        fx_traceback.get_current_meta().update(tags)
        yield


def saving(nodes: Collection[Node]) -> AbstractContextManager[None]:
    """Inside, what is traced for these nodes of a graph is tagged as saved for backward."""
    return variable_set(_SAVED, nodes)


class TaggedInterpreter(Interpreter):
    """Runs a graph node by node; what is traced for a node gets its metadata and the tags."""

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
    """Adds the tags to the current metadata, which is a copy of that of the running node, if it has any."""
    tags = _TAGS.get()
    if tags:
        fx_traceback.get_current_meta().update(tags)
