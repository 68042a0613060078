"""Which operator runs a body under a setting, and which setting a call of such an operator stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import Node

import partita.hops as hops
from partita._torch import torch_operators
from partita.errors import ModeError
from partita.graphs.mode import Autocast, Grad, Inference, Setting
from partita.rewrite.operator_calls import OperatorCall

__all__ = ["OperatorFamily", "operator_for", "runs_body", "setting_of"]

#: Whose operators are written: Partita's, or torch's own, for programs that must load without Partita.
OperatorFamily: TypeAlias = Literal["partita", "torch"]


def operator_for(setting: Setting, family: OperatorFamily = "partita") -> OperatorCall:
    """The operator that runs a body under `setting`."""
    ours = family == "partita"
    if isinstance(setting, Grad):
        with_grad = hops.wrap_with_set_grad_enabled if ours else torch_operators.WRAP_WITH_SET_GRAD_ENABLED
        return OperatorCall(with_grad, (setting.enabled,))
    if isinstance(setting, Autocast):
        with_autocast = hops.wrap_with_autocast if ours else torch_operators.WRAP_WITH_AUTOCAST
        return OperatorCall(with_autocast, (setting.device, setting.dtype, setting.enabled, setting.cache))
    if not ours:
        raise ModeError(
            "torch has no operator that runs a body in inference mode; use Partita's operators, or no_grad in the model"
        )
    return OperatorCall(hops.wrap_with_inference_mode, (setting.enabled,))


def setting_of(call: Node) -> Setting | None:
    """What a call of a mode operator, ours or torch's, sets for its body; None for a call that sets nothing."""
    leading = call.args[: runs_body(call) or 0]
    if call.target in (hops.wrap_with_set_grad_enabled, torch_operators.WRAP_WITH_SET_GRAD_ENABLED):
        return Grad(*_constants(call, leading, (bool,)))
    if call.target in (hops.wrap_with_autocast, torch_operators.WRAP_WITH_AUTOCAST):
        return Autocast(*_constants(call, leading, (str, torch.dtype | None, bool, bool | None)))
    if call.target is hops.wrap_with_inference_mode:
        return Inference(*_constants(call, leading, (bool,)))
    return None


def runs_body(call: Node) -> int | None:
    """The place of the body among the arguments of a call that only runs it; None for any other node."""
    return _BODY_PLACES.get(call.target) if call.op == "call_function" else None  # type: ignore[arg-type]


def _constants(call: Node, given: tuple[Any, ...], kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(given) == len(kinds) and len(call.args) > len(kinds) and all(map(isinstance, given, kinds)):
        return given
    if len(call.args) <= len(kinds):
        raise ModeError(
            f"node {call.name!r} is given its mode or its body by keyword: {call.format_node()}; in a graph, give them "
            "by position, as a trace does"
        )
    raise ModeError(
        f"node {call.name!r} switches a mode by values that are not constants: {call.format_node()}; "
        "a mode must be known before the program runs"
    )


_BODY_PLACES: dict[Callable[..., Any], int] = {
    hops.call: 0,
    hops.wrap: 0,
    torch_operators.WRAP: 0,
    hops.wrap_with_set_grad_enabled: 1,
    torch_operators.WRAP_WITH_SET_GRAD_ENABLED: 1,
    hops.wrap_with_inference_mode: 1,
    hops.wrap_with_autocast: 4,
    torch_operators.WRAP_WITH_AUTOCAST: 4,
}
