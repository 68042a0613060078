"""Names of what is to be kept: checked, so that a misspelled one does not quietly keep nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from weakref import WeakKeyDictionary

from torch.fx import Graph

from partita._torch.operators import operator_names
from partita.errors import OptionError, RecomputeError
from partita.graphs.imported import imported

__all__ = ["check_node_names", "check_operator_names"]


def check_node_names(wanted: frozenset[str], graph: Graph) -> None:
    """Raises where a name is that of no node of the graph."""
    question = (wanted, len(graph.nodes))
    found = _FOUND.setdefault(graph, set())
    if question in found:
        return
    names = {node.name for node in graph.nodes}
    for name in sorted(wanted - names):
        raise RecomputeError(f"no node is called {name!r}, so it cannot be kept{_hint(name, names)}")
    found.add(question)


def check_operator_names(names: Iterable[str]) -> None:
    """Raises where torch itself would have an operator or a function of that name, and has none.

    Operators of others may be registered later, and any name may be that of somebody's class.
    """
    for name in names:
        plain = name.replace("::", ".").removeprefix("torch.ops.")
        if plain.startswith("aten.") and imported(f"torch.ops.{plain}") is None:
            raise OptionError(f"torch has no operator {name!r}, so it cannot be kept{_hint(plain, operator_names())}")
        module, _, function = plain.rpartition(".")
        if module.split(".")[0] == "torch" and module in sys.modules and imported(plain) is None:
            near = (f"{module}.{known}" for known in dir(sys.modules[module]))
            raise OptionError(f"{module!r} has no {function!r}, so it cannot be kept{_hint(plain, near)}")


#: The names that were found in a graph of so many nodes: the regions of a plan ask one after the other.
_FOUND: WeakKeyDictionary[Graph, set[tuple[frozenset[str], int]]] = WeakKeyDictionary()


def _hint(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, sorted(known), n=3)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""
