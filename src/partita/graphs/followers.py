"""Followers: for nodes, those that stay behind them although no data flows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch.fx import Node

from partita.graphs.program import Program

__all__ = ["Followers", "followers_of"]

Followers: TypeAlias = Mapping[Node, Sequence[Node]]


def followers_of(program: Program) -> Followers:
    """Who stays behind whom in a program by its effects."""
    nodes = program.index.nodes
    followers: dict[Node, list[Node]] = {}
    for before, after in program.effects.edges():
        followers.setdefault(nodes[before], []).append(nodes[after])
    return followers
