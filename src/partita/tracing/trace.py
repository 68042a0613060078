"""What one trace of a model has come to, so that two traces under different callers can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from partita._torch import toggles
from partita._torch.capture_recorder import Recorder
from partita.graphs.index import Index
from partita.graphs.mode import AMBIENT, Autocast, Mode
from partita.graphs.modes import modes_of

__all__ = ["Trace"]


@final
@dataclass(frozen=True, slots=True)
class Trace:
    """The operators of a traced graph and of its bodies, each with its arguments and its mode, and the constants."""

    operators: tuple[Any, ...] = ()
    modes: tuple[Mode, ...] = ()
    constants: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, graph_module: GraphModule, recorder: Recorder) -> Trace:
        """What a graph says, and the tensors that its recorder has met."""
        bodies = [(path, body.graph) for path, body in graph_module.named_modules() if isinstance(body, GraphModule)]
        found = [(path, *operator) for path, graph in bodies for operator in _operators(graph)]
        return cls(
            tuple((path, *said) for path, said, _ in found),
            tuple(mode for _, _, mode in found),
            tuple(recorder.constants.tensors),
        )

    def computes_the_same(self, other: Trace) -> bool:
        """Whether both run the same operators on the same values, under whatever modes."""
        if self.operators != other.operators or len(self.constants) != len(other.constants):
            return False
        return all(map(_is_same_tensor, self.constants, other.constants))

    def differs_in_grad_only(self, other: Trace) -> bool:
        """Whether this is `other` but for where gradients are on."""
        pairs = zip(self.modes, other.modes, strict=True) if self.computes_the_same(other) else None
        return pairs is not None and all(
            ours.inference == theirs.inference and ours.autocast == theirs.autocast for ours, theirs in pairs
        )

    def only_switches_off_more(self, other: Trace) -> bool:
        """Whether this is `other` but for blocks that switch autocast off where `other` leaves it to the caller."""
        pairs = zip(self.modes, other.modes, strict=True) if self.computes_the_same(other) else None
        return pairs is not None and all(
            ours.grad is theirs.grad
            and ours.inference == theirs.inference
            and _only_switches_off_more(_by_device(ours), _by_device(theirs))
            for ours, theirs in pairs
        )


def _operators(graph: Graph) -> Iterator[tuple[tuple[Any, ...], Mode]]:
    """What each node says that is no toggle, in terms that mean the same in the graph of another trace."""
    index = Index(graph)
    modes = modes_of(index)
    places: dict[Node, int] = {}
    for number, node in enumerate(index.nodes):
        if number in modes.toggles or node.target is toggles.IS_GRAD_ENABLED:
            continue
        given = map_aggregate((node.args, dict(node.kwargs)), lambda value: _said(value, places))
        places[node] = len(places)
        # Arguments come in and results go out under no mode of their own.
        yield (node.op, node.target, given), AMBIENT if node.op in ("placeholder", "output") else modes.at(number)


def _said(value: Any, places: Mapping[Node, int]) -> tuple[Any, ...]:
    if isinstance(value, Node):
        return ("node", places.get(value))
    # Not every number equals itself, and some equal others that do not compute the same: nan, True, -0.0.
    return (type(value), repr(value) if isinstance(value, float | complex) else value)


def _is_same_tensor(ours: Tensor, theirs: Tensor) -> bool:
    if ours is theirs:
        return True
    if (ours.dtype, ours.shape, ours.device) != (theirs.dtype, theirs.shape, theirs.device) or ours.is_meta:
        return False
    with torch.no_grad():
        return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())


def _by_device(mode: Mode) -> Mapping[str, Autocast]:
    return {entered.device: entered for entered in mode.autocast}


def _only_switches_off_more(ours: Mapping[str, Autocast], theirs: Mapping[str, Autocast]) -> bool:
    if any(ours.get(device) != entered for device, entered in theirs.items()):
        return False
    return not any(entered.enabled for device, entered in ours.items() if device not in theirs)
