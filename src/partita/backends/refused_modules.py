"""Modules and bodies that compilers which trace with fake tensors do not take."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.backend_kernels import name_of_operator
from partita._torch.schemas import registers_hook
from partita.backends.reasons import DROPOUT, HOOK, LSTM, SIDE_EFFECT, UNKNOWN_MODULE
from partita.graphs.attributes import find
from partita.graphs.behaviour_modules import behaviour_of_module

__all__ = ["refusal_of_higher_order", "refusal_of_module"]


def refusal_of_module(node: Node, refusal: Callable[[Node], str | None]) -> str | None:
    """Why the call of a module is refused; that of a graph, if `refusal` refuses a node in it."""
    module = _named(node)
    return _refusal_of_body(module, refusal) if isinstance(module, nn.Module) else UNKNOWN_MODULE


def refusal_of_higher_order(node: Node, refusal: Callable[[Node], str | None]) -> str | None:
    """Why the call of an operator that runs bodies is refused."""
    if registers_hook(node.target):
        return HOOK
    if name_of_operator(node.target)[1] in _EFFECTS:
        return SIDE_EFFECT
    for given in node.all_input_nodes:
        body = _named(given) if given.op == "get_attr" else None
        reason = _refusal_of_body(body, refusal) if isinstance(body, nn.Module) else None
        if reason is not None:
            return reason
    return None


def _refusal_of_body(module: nn.Module, refusal: Callable[[Node], str | None]) -> str | None:
    if not isinstance(module, GraphModule):
        if any(isinstance(part, nn.LSTM) for part in module.modules()):
            return LSTM
        if any(map(_drops_between_layers, module.modules())):
            return DROPOUT
        behaviour = behaviour_of_module(module)
        return UNKNOWN_MODULE if behaviour.unknown else SIDE_EFFECT if behaviour.impure else None
    for node in module.graph.nodes:
        reason = refusal(node)
        if reason is not None:
            return f"in its body: {reason}"
    return None


def _drops_between_layers(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) and module.training and module.num_layers > 1 and module.dropout > 0


def _named(node: Node) -> object:
    """What the node names, if its graph knows the module that it belongs to."""
    owner = node.graph.owning_module
    return None if owner is None else find(owner, str(node.target))


_EFFECTS = frozenset(("call_torchbind", "print", "with_effects"))
