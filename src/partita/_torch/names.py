"""Node names: the ones that `Graph.create_node` would choose, found without asking a regular expression each time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from unicodedata import normalize

from torch.fx import Graph
from torch.fx.graph import _illegal_char_regex, _name_regex
from torch.fx.graph import _illegal_names as _names_of_python

from partita._torch.lasting import is_lasting

__all__ = ["ADDED_BY_EXPORT", "Names", "identifier"]

#: What `ExportedProgram.module` puts on the module that it makes.
ADDED_BY_EXPORT = frozenset(("_guards_fn", "_in_spec", "_out_spec", "validate_inputs"))


def identifier(text: str) -> str:
    """The text with a `_` for whatever cannot be in a name of Python, which takes letters that look alike for one."""
    return re.sub(r"\W", "_", normalize("NFKC", text))


class Names:
    """The names of one graph, shared with the graph's own table, so that later names stay unique as well."""

    def __init__(self, graph: Graph) -> None:
        namespace = graph._graph_namespace
        self._used, self._counts = namespace._used_names, namespace._base_count

    @classmethod
    def continuing(cls, graph: Graph) -> Names:
        """The names that new nodes of `graph` would get, without taking them."""
        names, namespace = cls(Graph()), graph._graph_namespace
        names._used.update(namespace._used_names)
        names._counts.update(namespace._base_count)
        return names

    def reserve(self, names: Any) -> None:
        """Takes `names` as they are; they must be free."""
        self._used.update(names)

    def fresh(self, candidate: str) -> str:
        """A free name like `candidate`, numbered where that is taken."""
        return self._free(*_parse(candidate))

    def fresh_for(self, target: Any) -> str:
        """The name that torch would give to the next node with this target."""
        if type(target) is str:
            return self._free(*_parse_target(target))
        # Operators hash in Python, so they are found by identity; the entry keeps its target alive.
        known = _CANDIDATES.get(id(target))
        if known is None:
            known = (target, _parse(_GRAPH._target_to_str(target)))
            if is_lasting(target):
                _CANDIDATES[id(target)] = known
        return self._free(*known[1])

    def fresh_for_all(self, targets: Iterable[Any]) -> list[str]:
        """`fresh_for` of each target in turn: one tight loop, since every node of a graph may be named here."""
        used, counts, candidates, names = self._used, self._counts, _CANDIDATES, []
        for target in targets:
            known = candidates.get(id(target))
            if known is None or known[1][2] is not None or known[1][0] in _illegal_names:
                names.append(self.fresh_for(target))
                continue
            candidate, base, _ = known[1]
            count = counts.get(base, 0)
            while candidate in used:
                count += 1
                candidate = f"{base}_{count}"
            used.add(candidate)
            counts[base] = count
            names.append(candidate)
        return names

    def _free(self, candidate: str, base: str, suffix: str | None) -> str:
        used, counts = self._used, self._counts
        if suffix is None or candidate in used:
            count = counts.get(base, 0)
            if candidate in _illegal_names:
                count += 1
                candidate = f"{base}_{count}"
        else:
            count = int(suffix)
        while candidate in used:
            count += 1
            candidate = f"{base}_{count}"
        used.add(candidate)
        counts[base] = count
        return candidate


def _parse(candidate: str) -> tuple[str, str, str | None]:
    match = _name_regex.match(candidate)
    if match is None:
        candidate = _illegal_char_regex.sub("_", candidate) or "_unnamed"
        candidate = f"_{candidate}" if candidate[0].isdigit() else candidate
        match = _name_regex.match(candidate)
        assert match is not None
    base, suffix = match.group(1, 2)
    return candidate, base, suffix


@lru_cache(maxsize=1 << 16)
def _parse_target(target: str) -> tuple[str, str, str | None]:
    return _parse(_GRAPH._target_to_str(target))


#: torch (2.13) lets a node be called `self`, and then finds no module in the code that it generates.
_illegal_names = frozenset((*_names_of_python, "self"))
#: What a node with this target would be called, by the identity of the target; functions and operators are few.
_CANDIDATES: dict[int, tuple[Any, tuple[str, str, str | None]]] = {}
_GRAPH = Graph()
