"""Higher-order operators for recomputation: a body that is recomputed in the backward, and segments of it to keep.

`wrap_activation_checkpoint` and `tag_activation_checkpoint` mean the same here. torch's two differ in how they annotate
a graph for the compiler, and neither recomputes correctly in eager mode.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from partita._torch.modes import Tracing, tracing_now
from partita.analysis.effects.terms import nodes_in
from partita.analysis.mutation import LaterUses, mutations_before
from partita.analysis.nodes import body_read
from partita.errors import OptionError
from partita.hops._torch.operator import BodyOperator, PlainBodyOperator, registered
from partita.program.program import Program
from partita.recompute._torch.keep import keep_scope
from partita.recompute._torch.run import CheckpointOptions, run_kept_tagged, run_recomputed, run_tagged, tag_nodes

#: Dynamo skips the frames of this module: they run around bodies after a graph break.
DYNAMO_SKIPS = True


log = logging.getLogger(__name__)

_CONTEXT = "_checkpoint_context_fn"
#: How the graph around a body uses its inputs after the call.
_LATER = "_checkpoint_later_uses"


class _Checkpoint(PlainBodyOperator):
    """`(function, *args, **kwargs)`: calls the function; its results are recomputed when the backward needs them.

    Keywords of `torch.utils.checkpoint.checkpoint` are the checkpoint's, all others the function's. The RNG state is
    preserved unless `preserve_rng_state=False` is passed.
    """

    dynamo_rule = "checkpoint"

    def run(self, mode: tuple[Any, ...], body: Any, operands: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        own, body_keywords = self.own_keywords(keywords)
        context_fn = own.pop("context_fn", None) or getattr(body, "meta", {}).get(_CONTEXT)
        if tracing_now() is not Tracing.NOT:
            if context_fn is not None:
                _warn_of_mutation()
            return run_tagged(body, operands, body_keywords, context_fn=context_fn, saved=_saved(body))
        preserve = own.pop("preserve_rng_state", True)
        return run_recomputed(body, operands, body_keywords, CheckpointOptions(preserve, context_fn, own))

    def own_keywords(self, keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        own, body_keywords = self.divide_kwargs(keywords)
        if own.pop("use_reentrant", None):
            _warn_of_reentrance()
        _check_options(own)
        return own, body_keywords

    def body_metadata(self, body: Any, own: dict[str, Any]) -> dict[str, Any]:
        context_fn = own.pop("context_fn", None) or getattr(body, "meta", {}).get(_CONTEXT)
        return {} if context_fn is None else {_CONTEXT: context_fn}

    @staticmethod
    def divide_kwargs(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The keywords of the checkpoint, and those of its function; `kwargs` stays as it is."""
        own = {name: value for name, value in kwargs.items() if name in _checkpoint_keywords()}
        return own, {name: value for name, value in kwargs.items() if name not in own}

    @staticmethod
    def finish_graph(gm: GraphModule) -> None:
        """Tags in Dynamo's graph what a compiler must not recompute, inside checkpoints and outside."""
        _tag_saved(gm, LaterUses())

    @staticmethod
    def tag_nodes(gmod: Any, is_sac: bool) -> Any:  # noqa: FBT001  The signature is torch's.
        """Tags every call of `gmod`, in place, for a partitioner: to be decided later if `is_sac`, else recomputed."""
        return tag_nodes(gmod, is_sac)


class WrapActivationCheckpoint(_Checkpoint):
    """`(function, *args, **kwargs)`: calls the function; its results are recomputed for the backward."""

    parameters = ("function",)


class TagActivationCheckpoint(_Checkpoint):
    """`(gmod, *args, **kwargs)`: calls the module; its results are recomputed for the backward."""

    parameters = ("gmod",)


class _Keep(PlainBodyOperator):
    """`(body, *operands, **keywords)`: calls the body; a checkpoint around it keeps the results."""

    dynamo_rule = "wrapped"

    def run(self, mode: tuple[Any, ...], body: Any, operands: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if tracing_now() is not Tracing.NOT:
            return run_kept_tagged(body, operands, keywords)
        return super().run(mode, body, operands, keywords)

    def scope(self, *mode: Any, tracing: Tracing) -> AbstractContextManager[Any]:
        return keep_scope() if tracing is Tracing.NOT else nullcontext()


def _saved(body: Any) -> frozenset[Node]:
    """What a compiler must not recompute, since the inputs of the body are mutated, by itself or after it."""
    if not isinstance(body, GraphModule):
        return frozenset()
    found = mutations_before(Program(body).calls, body.meta.get(_LATER, LaterUses()))
    return frozenset(node for node in body.graph.nodes if node.name in found.saved_when_compiled)


def _tag_saved(gm: GraphModule, later: LaterUses) -> None:
    """Tags reads of memory that is mutated: a partitioner that recomputes something chooses more nodes itself.

    The body of a checkpoint is annotated with later uses of its inputs, since it tags its own nodes when it runs.
    """
    mutations = mutations_before(Program(gm).calls, later)
    for node in gm.graph.nodes:
        if node.name not in mutations.saved_when_compiled:
            continue
        operator = node.target
        if not isinstance(operator, BodyOperator):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            continue
        named, *operands = node.args[operator.mode_count :]
        body = body_read(gm, named) if isinstance(named, Node) else None
        if body is None:
            continue
        inputs = [placeholder.name for placeholder in body.graph.find_nodes(op="placeholder")]
        sources = {name: list(nodes_in(operand)) for name, operand in zip(inputs, operands, strict=False)}
        uses = mutations.later_uses(node, sources)
        if isinstance(operator, _Checkpoint):
            known: LaterUses = body.meta.get(_LATER, LaterUses())  # Of another call of the same body.
            body.meta[_LATER] = LaterUses(known.mutated | uses.mutated, known.read | uses.read)
        else:
            _tag_saved(body, uses)


def _check_options(own: dict[str, Any]) -> None:
    context_fn, check = own.get("context_fn"), own.get("determinism_check", "default")
    if context_fn is not None and not callable(context_fn):
        raise OptionError(
            f"context_fn is a function that returns the contexts of the first and of the second run, not {context_fn!r}"
        )
    if check not in ("default", "none"):
        raise OptionError(f"determinism_check is 'default' or 'none', not {check!r}")


@cache
def _checkpoint_keywords() -> frozenset[str]:
    known = inspect.signature(checkpoint).parameters
    return frozenset(known) - {"function", "args", "kwargs"} | {"preserve_rng_state"}


@cache
def _warn_of_mutation() -> None:
    log.warning(
        "a context function decides what a compiled checkpoint saves; its region must not mutate in place (relu_, say)"
    )


@cache
def _warn_of_reentrance() -> None:
    log.warning("a checkpoint operator is never reentrant, here as in torch: use_reentrant=True is ignored")


def restore_rng_in_checkpoints(module: nn.Module) -> None:
    """Replaces torch's checkpoint operators in the graphs of a module that runs eagerly, where they do not replay.

    Dynamo writes them for `torch.utils.checkpoint`, for compilers; called as they are, they do not restore the RNG
    state for the backward (torch 2.13).
    """
    for inner in module.modules():
        if isinstance(inner, GraphModule):
            calls = [node for name in _TORCHS for node in inner.graph.find_nodes(op="call_function", target=name)]
            for node in calls:
                node.target = tag_activation_checkpoint
            if calls:
                inner.recompile()


_TORCHS = (torch.ops.higher_order.tag_activation_checkpoint, torch.ops.higher_order.wrap_activation_checkpoint)
_HOME = "partita.recompute"

wrap_activation_checkpoint = registered(
    WrapActivationCheckpoint, "partita_wrap_activation_checkpoint", home=(_HOME, "wrap_activation_checkpoint")
)
tag_activation_checkpoint = registered(
    TagActivationCheckpoint, "partita_tag_activation_checkpoint", home=(_HOME, "tag_activation_checkpoint")
)
keep = registered(_Keep, "partita_keep", home=(_HOME, "keep"))
