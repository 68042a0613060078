"""Operators that set modes, read from a wrapped graph: which of them set nothing that was not set around them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from partita import hops
from partita._torch import torch_operators
from partita.testing.nested_graphs import bodies_of_call

__all__ = ["idle_operators"]

#: What is known to be set: "grad", "inference", "cache", and for each device "cpu enabled" and "cpu dtype".
_Settings = Mapping[str, object]


def idle_operators(module: GraphModule, *, known: Collection[str], grad: bool | None) -> list[str]:
    """The calls, but for `known` ones, that change nothing for their body, in a program called under this grad mode.

    A body that is run in several places may need an operator in one of them only.
    """
    around: _Settings = {} if grad is None else {"grad": grad}
    changes: dict[Node, list[str | None]] = {}
    for node, idle_at in _new_operators(module, known, around, ""):
        changes.setdefault(node, []).append(idle_at)
    return [idle[0] for idle in changes.values() if idle[0] is not None and None not in idle]


def _new_operators(
    module: GraphModule, known: Collection[str], around: _Settings, path: str
) -> Iterator[tuple[Node, str | None]]:
    """Every call that is not known, once for each way to it, and its path where it changes nothing."""
    for node in module.graph.nodes:
        for place, body in bodies_of_call(module, node):
            inside = {**around, **_settings(node)}
            is_known = f"{path}{node.name}" in known
            if not is_known:
                yield node, f"{path}{node.name}" if inside == around else None
            yield from _new_operators(body, known, inside, f"{path}{node.name}/{place}/" if is_known else path)


def _settings(call: Node) -> _Settings:
    read = _READ.get(call.target)  # type: ignore[arg-type]
    return read(*call.args) if read else {}


def _of_grad(enabled: bool, *_: Any) -> _Settings:  # noqa: FBT001
    return {"grad": enabled}


def _of_inference(mode: bool, *_: Any) -> _Settings:  # noqa: FBT001
    return {"inference": mode, "grad": not mode}


def _of_autocast(device: str, dtype: object, enabled: bool, cache: bool | None, *_: Any) -> _Settings:  # noqa: FBT001
    given = {f"{device} enabled": enabled, f"{device} dtype": dtype, "cache": cache}
    return {name: value for name, value in given.items() if value is not None}


_READ: Mapping[Callable[..., Any], Callable[..., _Settings]] = {
    hops.wrap_with_set_grad_enabled: _of_grad,
    torch_operators.WRAP_WITH_SET_GRAD_ENABLED: _of_grad,
    hops.wrap_with_inference_mode: _of_inference,
    hops.wrap_with_autocast: _of_autocast,
    torch_operators.WRAP_WITH_AUTOCAST: _of_autocast,
}
