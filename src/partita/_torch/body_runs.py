"""Running a body: in its scope, with the modes put back that a failing body has left switched."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx.traceback import has_preserved_node_meta

from partita._torch.ambient import read_ambient, restore_after_error
from partita._torch.node_tags import TaggedInterpreter
from partita._torch.schemas import nodes_by_target

__all__ = ["run", "run_body"]

#: Functions of Python that run no code of a user's, given tensors and numbers.
_PLAIN_FUNCTIONS = frozenset(
    getattr(module, name) for module in (operator, math) for name in dir(module) if callable(getattr(module, name))
) - {operator.call}


def run_body(
    scope: AbstractContextManager[Any],
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> Any:
    """What `body` gives in `scope`; when it raises, all modes are as they were before."""
    if _switches_nothing(body):
        with scope:
            return run(body, operands, keywords)
    with scope:
        # Inside: a mode that the body left switched was entered under the scope, and is left under it.
        ambient = read_ambient()
        try:
            return run(body, operands, keywords)
        except BaseException as error:
            restore_after_error(ambient, error)
            raise


def run(body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """What `body` gives; node by node where a tracer copies the metadata of each node, as torch does for the graph."""
    if has_preserved_node_meta() and not keywords and _is_plain_graph(body):
        return TaggedInterpreter(cast(GraphModule, body)).run(*operands)
    return body(*operands, **keywords)


def _switches_nothing(body: Any) -> bool:
    """Whether the graph of `body` shows that no node in it can leave a mode switched."""
    return _is_plain_graph(body) and all(
        op in ("placeholder", "get_attr", "output") or (op == "call_function" and _is_plain(target)) or not nodes
        for (op, target), nodes in nodes_by_target(body.graph).items()
    )


def _is_plain(target: Any) -> bool:
    """Whether a function is one of torch's kernels or of Python's; any other may run Python code, or a body."""
    return target.namespace in ("aten", "prims") if isinstance(target, OpOverload) else target in _PLAIN_FUNCTIONS


def _is_plain_graph(body: Any) -> bool:
    return (
        isinstance(body, GraphModule)
        and "forward" not in vars(body)
        and body._compiled_call_impl is None
        and not (body._forward_hooks or body._forward_pre_hooks)
    )
