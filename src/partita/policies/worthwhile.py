"""Worthwhile: asking a user's function whether a region is worth its call, or which nodes of it are."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

from torch.fx import Node

from partita.errors import CallbackError
from partita.policies.asking import NO_REASON, asked
from partita.regions import Region

__all__ = ["Worthwhile", "worthwhile_nodes"]

#: Whether a region is worth its call: True or False, a text with the reason to leave it out, or the nodes to keep.
Worthwhile: TypeAlias = Callable[[Region], bool | str | Collection[Node]]


def worthwhile_nodes(worthwhile: Worthwhile, region: Region) -> tuple[frozenset[Node], str]:
    """The nodes of a region that are worthwhile, and why the others are not."""
    answer: object = asked(worthwhile, region, node=region.nodes[0], role="`worthwhile`")
    if answer is True:
        return frozenset(region.nodes), ""
    if answer is False:
        return frozenset(), "`worthwhile` says no"
    if isinstance(answer, str):
        return frozenset(), answer if answer.strip() else NO_REASON
    if isinstance(answer, Collection) and all(isinstance(node, Node) for node in answer):
        inside = frozenset(region.nodes)
        stray = next((node.name for node in answer if node not in inside), None)
        if stray is not None:
            raise CallbackError(f"`worthwhile` keeps {stray!r}, which is not in region {region.name!r}")
        return frozenset(answer), "`worthwhile` keeps other nodes of it"
    raise CallbackError(
        f"`worthwhile` answered {answer!r} for region {region.name!r}; it answers True, False, a reason, or the nodes "
        "to keep"
    )
