"""The autocast blocks around each operator of a trace, for models that ask whether their caller has autocast on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch.fx import GraphModule

from partita.graphs.index import Index
from partita.graphs.modes import Autocast, modes_of

__all__ = ["AutocastTrace"]


@final
@dataclass(frozen=True, slots=True)
class AutocastTrace:
    """The operators of a traced graph, each with the blocks around it by device."""

    operators: tuple[tuple[Any, Mapping[str, Autocast]], ...] = ()

    @classmethod
    def of(cls, graph_module: GraphModule) -> AutocastTrace:
        """That of a graph, without the bodies that it calls."""
        index = Index(graph_module.graph)
        modes = modes_of(index)
        numbers = (number for number in range(len(index.nodes)) if number not in modes.toggles)
        return cls(
            tuple(
                (index.nodes[number].target, {entered.device: entered for entered in modes.at(number).autocast})
                for number in numbers
            )
        )

    def only_switches_off_more(self, other: AutocastTrace) -> bool:
        """Whether this is `other` but for blocks that switch autocast off where `other` leaves it to the caller."""
        if [target for target, _ in self.operators] != [target for target, _ in other.operators]:
            return False
        pairs = zip(self.operators, other.operators, strict=True)
        return all(_only_switches_off_more(ours, theirs) for (_, ours), (_, theirs) in pairs)


def _only_switches_off_more(ours: Mapping[str, Autocast], theirs: Mapping[str, Autocast]) -> bool:
    if any(ours.get(device) != entered for device, entered in theirs.items()):
        return False
    return not any(entered.enabled for device, entered in ours.items() if device not in theirs)
