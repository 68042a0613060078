"""What it is worth to keep a result: the FLOPs that a second run is spared, for each byte."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch.fx import Graph, Node

from partita.graphs.flops import Flops
from partita.graphs.kept_bytes import KeptBytes
from partita.graphs.saving_trials import SavingTrials
from partita.regions import Region

__all__ = ["Worth", "worth_keeping"]


class Worth(NamedTuple):
    """What keeping one result spares, and what it takes."""

    flops: int
    bytes: int

    @property
    def flops_per_byte(self) -> float:
        return self.flops / self.bytes


def worth_keeping(region: Region, nodes: Iterable[Node]) -> dict[Node, Worth]:
    """Those of these nodes of a region that it spares a second run something to keep, as far as traced values tell.

    A second run ends where the last of what autograd saves in the region is there again: what comes later, and what
    nobody reads, is not computed again for its own sake.
    """
    graph = region.nodes[0].graph
    known = _KNOWN.get(graph)
    if known is None:
        known = _KNOWN[graph] = _Known(Flops(), KeptBytes(), SavingTrials())
    found = {
        node: Worth(flops, known.bytes.of(node)) for node in nodes if node.users and (flops := known.flops.of(node))
    }
    if not found:
        return {}
    unspared = _not_computed_again(region, known.trials)
    return {node: worth for node, worth in found.items() if worth.bytes and node not in unspared}


class _Known(NamedTuple):
    """What was found out about the operators of a graph, whose regions have many in common."""

    flops: Flops
    bytes: KeptBytes
    trials: SavingTrials


_KNOWN: WeakKeyDictionary[Graph, _Known] = WeakKeyDictionary()


def _not_computed_again(region: Region, trials: SavingTrials) -> set[Node]:
    """The nodes at the end of a region that a second run does not get to, or ends in before they have computed."""
    found: set[Node] = set()
    for node in sorted(region.nodes, reverse=True):
        saves = trials.flops_until_saved(node)
        if saves is None:
            found.add(node)
            continue
        return found | {node} if saves == 0 else found
    return found
