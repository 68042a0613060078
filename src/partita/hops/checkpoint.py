"""Operators for recomputation: a body whose results are computed again in the backward, and what is kept of them.

`wrap_activation_checkpoint` and `tag_activation_checkpoint` mean the same here. torch's two differ in how a compiler
is told, and neither is right in eager.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar, overload

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from partita._torch.body_operators import BodyOperator, registered
from partita._torch.checkpoint_keeping import keep_scope
from partita._torch.checkpoint_runs import CheckpointOptions, run_recomputed
from partita._torch.checkpoint_tags import run_kept_tagged, run_tagged, tag_nodes
from partita._torch.tracing_state import Tracing, tracing_now
from partita.errors import OptionError
from partita.graphs.later_writes import saved_when_compiled

__all__ = [
    "TagActivationCheckpoint",
    "WrapActivationCheckpoint",
    "keep",
    "tag_activation_checkpoint",
    "wrap_activation_checkpoint",
]

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_CONTEXT = "_checkpoint_context_fn"


class _Checkpoint(BodyOperator):
    """`(function, *args, **kwargs)`: calls the function; its results are computed again when the backward needs them.

    Keywords that `torch.utils.checkpoint.checkpoint` knows are the checkpoint's, all others the function's. The state
    of the random number generators is preserved unless `preserve_rng_state=False` is given.
    """

    dynamo_rule = "checkpoint"

    @overload
    def __call__(self, function: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> _Result: ...

    @overload
    def __call__(self, /, **kwargs: Any) -> Any: ...

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.enact(args, kwargs)

    def run(self, mode: tuple[Any, ...], body: Any, operands: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        own, theirs = self.own_keywords(keywords)
        context_fn = own.pop("context_fn", None) or getattr(body, "meta", {}).get(_CONTEXT)
        if tracing_now() is not Tracing.NOT:
            if context_fn is not None:
                _warn_of_writes()
            return run_tagged(body, operands, theirs, context_fn=context_fn, saved=_saved(body))
        preserve = own.pop("preserve_rng_state", True)
        return run_recomputed(body, operands, theirs, CheckpointOptions(preserve, context_fn, own))

    def own_keywords(self, keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        own, theirs = self.divide_kwargs(keywords)
        if own.pop("use_reentrant", None):
            _warn_of_reentrance()
        _check_options(own)
        return own, theirs

    def body_metadata(self, body: Any, own: dict[str, Any]) -> dict[str, Any]:
        context_fn = own.pop("context_fn", None) or getattr(body, "meta", {}).get(_CONTEXT)
        return {} if context_fn is None else {_CONTEXT: context_fn}

    @staticmethod
    def divide_kwargs(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The keywords of the checkpoint, and those of its function; `kwargs` stays as it is."""
        own = {name: value for name, value in kwargs.items() if name in _checkpoint_keywords()}
        return own, {name: value for name, value in kwargs.items() if name not in own}

    @staticmethod
    def tag_nodes(gmod: Any, is_sac: bool) -> Any:  # noqa: FBT001  The signature is torch's.
        """Tags every call of `gmod`, in place, for a partitioner: to be decided later if `is_sac`, else recomputed."""
        return tag_nodes(gmod, is_sac)


class WrapActivationCheckpoint(_Checkpoint):
    """`(function, *args, **kwargs)`: calls the function; its results are computed again for the backward."""

    parameters = ("function",)


class TagActivationCheckpoint(_Checkpoint):
    """`(gmod, *args, **kwargs)`: calls the module; its results are computed again for the backward."""

    parameters = ("gmod",)


class _Keep(BodyOperator):
    """`(body, *operands, **keywords)`: calls the body; a checkpoint around it keeps what that gives."""

    dynamo_rule = "wrapped"

    @overload
    def __call__(self, body: Callable[..., _Result], /, *operands: Any, **keywords: Any) -> _Result: ...

    @overload
    def __call__(self, /, **keywords: Any) -> Any: ...

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        return self.enact(args, keywords)

    def run(self, mode: tuple[Any, ...], body: Any, operands: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if tracing_now() is not Tracing.NOT:
            return run_kept_tagged(body, operands, keywords)
        return super().run(mode, body, operands, keywords)

    def scope(self, *mode: Any, tracing: Tracing) -> AbstractContextManager[Any]:
        return keep_scope() if tracing is Tracing.NOT else nullcontext()


def _saved(body: Any) -> frozenset[Node]:
    """What a compiler may not compute again, since the body writes to its inputs."""
    return frozenset(saved_when_compiled(tuple(body.graph.nodes)) if isinstance(body, GraphModule) else ())


def _check_options(own: dict[str, Any]) -> None:
    context_fn, check = own.get("context_fn"), own.get("determinism_check", "default")
    if context_fn is not None and not callable(context_fn):
        raise OptionError(
            f"context_fn is a function that gives the contexts of the first and of the second run, not {context_fn!r}"
        )
    if check not in ("default", "none"):
        raise OptionError(f"determinism_check is 'default' or 'none', not {check!r}")


@cache
def _checkpoint_keywords() -> frozenset[str]:
    known = inspect.signature(checkpoint).parameters
    return frozenset(known) - {"function", "args", "kwargs"} | {"preserve_rng_state"}


@cache
def _warn_of_writes() -> None:
    log.warning(
        "a context function decides what a compiled checkpoint saves; its region must not write in place (relu_, say)"
    )


@cache
def _warn_of_reentrance() -> None:
    log.warning("a checkpoint operator is never reentrant, here as in torch: use_reentrant=True is taken for False")


_HOME = "partita.hops"

wrap_activation_checkpoint = registered(
    WrapActivationCheckpoint, "partita_wrap_activation_checkpoint", home=(_HOME, "wrap_activation_checkpoint")
)
tag_activation_checkpoint = registered(
    TagActivationCheckpoint, "partita_tag_activation_checkpoint", home=(_HOME, "tag_activation_checkpoint")
)
keep = registered(_Keep, "partita_keep", home=(_HOME, "keep"))
