"""Strongly connected components: vertices that reach each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["components"]


def components(vertices: Iterable[int], successors: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """The components of a graph, each after those that it leads to; linear, and without recursion (Tarjan)."""
    search = _Search(successors)
    for vertex in vertices:
        if vertex not in search.lowest:
            search.visit(vertex)
    return search.found


class _Search:
    """A depth-first search; `lowest` is the earliest vertex on the path that a vertex reaches, while it is open."""

    def __init__(self, successors: Mapping[int, Sequence[int]]) -> None:
        self.successors = successors
        self.lowest: dict[int, int] = {}
        self.open: dict[int, None] = {}
        self.found: list[list[int]] = []

    def visit(self, start: int) -> None:
        path = [(start, self._enter(start), iter(self.successors.get(start, ())))]
        while path:
            vertex, number, rest = path[-1]
            for after in rest:
                if after not in self.lowest:
                    path.append((after, self._enter(after), iter(self.successors.get(after, ()))))
                    break
                if after in self.open:
                    self.lowest[vertex] = min(self.lowest[vertex], self.lowest[after])
            else:
                path.pop()
                if path:
                    above = path[-1][0]
                    self.lowest[above] = min(self.lowest[above], self.lowest[vertex])
                if self.lowest[vertex] == number:
                    self._close(vertex)

    def _enter(self, vertex: int) -> int:
        number = len(self.lowest)
        self.lowest[vertex] = number
        self.open[vertex] = None
        return number

    def _close(self, vertex: int) -> None:
        component = []
        while True:
            member, _ = self.open.popitem()
            component.append(member)
            if member == vertex:
                break
        self.found.append(component)
