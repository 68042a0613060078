"""Running a body: in its scope, with the modes put back that a failing body has left switched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

from torch.fx import GraphModule, Interpreter
from torch.fx.traceback import has_preserved_node_meta

from partita._torch.ambient import read_ambient, restore_after_error
from partita._torch.schemas import nodes_by_target
from partita._torch.toggles import TOGGLES

__all__ = ["run", "run_body"]


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
    ambient = read_ambient()
    try:
        with scope:
            return run(body, operands, keywords)
    except BaseException as error:
        restore_after_error(ambient, error)
        raise


def run(body: Callable[..., Any], operands: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """What `body` gives; node by node where a tracer copies the metadata of each node, as torch does for the graph."""
    if has_preserved_node_meta() and not keywords and _is_plain_graph(body):
        return Interpreter(cast(GraphModule, body)).run(*operands)
    return body(*operands, **keywords)


def _switches_nothing(body: Any) -> bool:
    """Whether the graph of `body` shows that no node in it can leave a mode switched."""
    if not isinstance(body, GraphModule):
        return False
    targets = nodes_by_target(body.graph)
    return ("call_module", None) not in targets and not any(("call_function", toggle) in targets for toggle in TOGGLES)


def _is_plain_graph(body: Any) -> bool:
    return (
        isinstance(body, GraphModule)
        and "forward" not in vars(body)
        and body._compiled_call_impl is None
        and not (body._forward_hooks or body._forward_pre_hooks)
    )
