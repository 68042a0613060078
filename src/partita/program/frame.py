"""Frame: a graph that is one part of a model, and the path of its module in that model."""

from __future__ import annotations

from typing import NamedTuple, final

from torch import nn

from partita.analysis.mode import Autocast


@final
class Frame(NamedTuple):
    """A Python frame that Dynamo traced into a graph of its own.

    Graph breaks, hooks that are not traced and `layer.compile()` make several frames of a model.
    """

    #: The class of the module whose `forward` runs in the frame; None where that is unknown.
    type: type[nn.Module] | None = None
    #: The paths of that module in the modules that were running around it, in the outermost one first.
    paths: tuple[str, ...] = ()
    #: The autocast that it was traced under, and is called under: Dynamo guards on it.
    autocast: tuple[Autocast, ...] = ()
