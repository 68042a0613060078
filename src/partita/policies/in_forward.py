"""InForward: the regions that another policy finds in the forward of a joint graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from partita.errors import OptionError
from partita.graphs.joint_forward import forward_part
from partita.graphs.program import Program
from partita.regions import Partition, Region

__all__ = ["InForward"]


@final
@dataclass(frozen=True, slots=True)
class InForward:
    """Regions of the forward of a joint graph, as `policy` finds them; it sees no node of the backward."""

    policy: Callable[[Program], Partition]

    def __post_init__(self) -> None:
        if not callable(self.policy) or isinstance(self.policy, type):
            raise OptionError(f"InForward takes a policy such as ByModule('layers.*'), not {self.policy!r}")

    def __call__(self, program: Program) -> Partition:
        part = forward_part(program)
        found = self.policy(part.program)
        if not isinstance(found, Partition):
            raise OptionError(f"a policy gives a Partition, not {type(found).__name__}; policy: {self.policy!r}")
        regions = [
            Region(region.name, tuple(part.original[node] for node in region.nodes), region.label) for region in found
        ]
        reasons = {part.original[node]: reason for node, reason in found.reasons.items()}
        seen = set(part.original.values())
        joint = program.joint
        assert joint is not None
        reasons |= dict.fromkeys(joint.backward, "it belongs to the backward")
        reasons |= {node: "it must run after some of the backward" for node in joint.forward if node not in seen}
        return Partition(program, regions, reasons)
