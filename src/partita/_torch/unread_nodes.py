"""Nodes that nobody reads, in bodies: torch's dead-code elimination looks into bodies and there deletes too much."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph

__all__ = ["keep_unread_nodes", "keeps_unread_nodes"]


def keep_unread_nodes(graph: Graph) -> None:
    """Lets dead-code elimination of the graph around it leave this graph as it is.

    A trace keeps random draws, and batch norms that write their statistics without saying so, though nobody reads
    them; but in the bodies that the traced graph calls it deletes them (torch 2.13).
    """
    graph.eliminate_dead_code = _nothing_is_dead  # type: ignore[method-assign]


def keeps_unread_nodes(graph: Graph) -> bool:
    """Whether that was asked for; a copy of the graph does not know."""
    return "eliminate_dead_code" in graph.__dict__


def _nothing_is_dead(*args: Any, **keywords: Any) -> bool:
    return False
