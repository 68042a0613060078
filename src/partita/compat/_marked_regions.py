"""Regions that `torch.fx.traceback.annotate({"compile_with_inductor": ...})` marks, and the options of each."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch.fx import GraphModule, Node

from partita.backends.backend import Backend
from partita.backends.inductor import Inductor
from partita.errors import OptionError
from partita.graphs.attributes import find
from partita.graphs.program import Program
from partita.policies.by_capability import ByCapability
from partita.regions import Partition, Region

__all__ = ["MarkedRegions", "is_marked", "marked_modules"]

log = logging.getLogger(__name__)

_MARK = "compile_with_inductor"


def is_marked(node: Node) -> bool:
    """Whether the node is to be compiled."""
    custom = node.meta.get("custom")
    return node.op not in ("placeholder", "output") and isinstance(custom, Mapping) and _MARK in custom


def marked_modules(gm: GraphModule) -> list[GraphModule]:
    """`gm` and the bodies of its operators that hold marked nodes; not those that a marked operator runs whole."""
    found: dict[GraphModule, None] = {}
    waiting = [gm]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting += _bodies(module)
    return [module for module in found if any(map(is_marked, module.graph.nodes))]


@final
class MarkedRegions:
    """The fewest regions that hold all marked nodes of a module which Inductor takes.

    Nodes with different options are apart, and so are nodes with different names of their regions.
    """

    def __init__(self, gm: GraphModule) -> None:
        program = Program.of(gm)
        self._wearers: dict[Hashable, _Wearer] = {}
        for node in filter(is_marked, program.operators()):
            label = _label(node)
            if label not in self._wearers:
                self._wearers[label] = _Wearer(label, _backend(node))
        wearers = tuple(self._wearers.values())
        self.partition = ByCapability(wearers)(program) if wearers else Partition(program, [])
        for node, reason in self.partition.reasons.items():
            if is_marked(node) and self._wearers[_label(node)](node) is not None:
                log.warning("%s is marked with %r and runs as it is: %s", node, _MARK, reason)

    def backend_of(self, region: Region) -> Backend:
        """Inductor with the options of a region."""
        return self._wearers[next(_label(node) for node in region.nodes if is_marked(node))].backend


@final
@dataclass(frozen=True, slots=True)
class _Wearer:
    """Takes the nodes of one label that its backend takes."""

    label: Hashable
    backend: Backend

    @property
    def __name__(self) -> str:
        return self.backend.name

    def __call__(self, node: Node) -> str | None:
        if not is_marked(node) or _label(node) != self.label:
            return f"not marked with {_MARK!r}"
        return self.backend.refusal(node)


def _label(node: Node) -> Hashable:
    """What the nodes of one region have in common: the name of the region, and the options."""
    value = node.meta["custom"][_MARK]
    name = value.get("inductor_region") if isinstance(value, Mapping) else None
    return name, repr(sorted(_options(node).items()))


def _options(node: Node) -> Mapping[str, Any]:
    value = node.meta["custom"][_MARK]
    found = value.get("inductor_configs") if isinstance(value, Mapping) else None
    return found or {}


def _backend(node: Node) -> Backend:
    try:
        return Inductor(_options(node))
    except OptionError as error:
        raise OptionError(f"Invalid inductor config key in the annotation of {node.name!r}: {error}") from error


def _bodies(module: GraphModule) -> Iterator[GraphModule]:
    for node in module.graph.find_nodes(op="get_attr"):
        body = find(module, str(node.target))
        if isinstance(body, GraphModule) and not all(map(is_marked, node.users)):
            yield body
