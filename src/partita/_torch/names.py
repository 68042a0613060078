"""Node names: the ones that `Graph.create_node` would choose, found without asking a regular expression each time."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph
from torch.fx.graph import _illegal_char_regex, _illegal_names, _name_regex

__all__ = ["Names"]


class Names:
    """The names of one graph, shared with the graph's own table, so that later names stay unique as well."""

    def __init__(self, graph: Graph) -> None:
        namespace = graph._graph_namespace
        self._graph = graph
        self._used, self._counts = namespace._used_names, namespace._base_count
        self._by_target: dict[Any, tuple[str, str, str | None]] = {}

    def reserve(self, names: Any) -> None:
        """Takes `names` as they are; they must be free."""
        self._used.update(names)

    def fresh(self, candidate: str) -> str:
        """A free name like `candidate`, numbered where that is taken."""
        return self._free(*_parse(candidate))

    def fresh_for(self, target: Any) -> str:
        """The name that torch would give to the next node with this target."""
        parsed = self._by_target.get(target)
        if parsed is None:
            parsed = self._by_target[target] = _parse(self._graph._target_to_str(target))
        return self._free(*parsed)

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
