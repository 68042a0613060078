"""Operators that a user names by text: which nodes call them, and which of those stand at the border of a partition."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import final

from torch.fx import Node

from partita._torch.qualified_names import qualified_names
from partita.errors import OptionError

__all__ = ["NamedOperators", "bookends", "checked_names"]


def checked_names(names: Sequence[str] | None, role: str) -> Sequence[str]:
    """`names` itself, when it is a collection of names; none if it is None."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
        raise OptionError(f"{role} is a list of names of functions, like ['torch.ops.aten.view'], not {names!r}")
    return [] if names is None else names


@final
class NamedOperators:
    """The functions with these names; the name of an operator stands for all of its overloads."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        # By identity, since hashing an operator is slow; what is asked about is alive in its graph meanwhile.
        self._known: dict[int, bool] = {}

    def __contains__(self, node: Node) -> bool:
        """Whether `node` calls one of the functions."""
        if not self.names or node.op != "call_function":
            return False
        key = id(node.target)
        if key not in self._known:
            self._known[key] = not self.names.isdisjoint(qualified_names(node.target))
        return self._known[key]

    def names_call(self, node: Node) -> bool:
        """Whether `node` calls one of the functions, as a function or as a method of a tensor."""
        return node in self or (node.op == "call_method" and f"torch.ops.aten.{node.target}" in self.names)


def bookends(nodes: Collection[Node], idle: NamedOperators) -> set[Node]:
    """The idle nodes that read nothing in `nodes` but such nodes, and those that nothing else in `nodes` reads."""
    inside, in_order = frozenset(nodes), sorted(nodes)
    leading: set[Node] = set()
    for node in in_order:
        if node in idle and all(_is_passed_over(read, inside, leading) for read in node.all_input_nodes):
            leading.add(node)
    trailing: set[Node] = set()
    for node in reversed(in_order):
        if node in idle and all(_is_passed_over(user, inside, trailing) for user in node.users):
            trailing.add(node)
    return leading | trailing


def _is_passed_over(node: Node, inside: frozenset[Node], idle: set[Node]) -> bool:
    return node not in inside or node in idle or node.op == "placeholder"
