"""Telling Dynamo about operators without importing it: at once if it is there, else in the moment that it is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol

from partita._torch.dynamo_rules import RULES

__all__ = ["TracedByRule", "tell_dynamo"]

_VARIABLES = "torch._dynamo.variables.higher_order_ops"


class TracedByRule(Protocol):
    """An operator that says by which of the rules Dynamo traces a call of it."""

    __name__: str
    dynamo_rule: str


def tell_dynamo(operators: Iterable[TracedByRule]) -> None:
    """Dynamo traces a call of each of these operators by the operator's own rule.

    An operator that Dynamo does not know ends its graph. Where torch has no table of them, this changes nothing.
    """
    if _VARIABLES in sys.modules:
        _register(importlib.import_module(_VARIABLES), operators)  # Waits for a thread that is importing it.
    else:
        sys.meta_path.insert(0, _Awaiting(operators))


class _Awaiting(MetaPathFinder, Loader):
    """Stands before the finders until the module is imported, registers the operators in it, and is gone."""

    def __init__(self, operators: Iterable[TracedByRule]) -> None:
        self._operators = tuple(operators)
        self._loader: Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _VARIABLES:
            return None
        # A new list: other threads may be walking the old one.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        spec = find_spec(fullname)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module, self._operators)


def _register(module: Any, operators: Iterable[TracedByRule]) -> None:
    table = getattr(module, "_hop_name_to_variable_class", None)
    if not isinstance(table, dict):
        return
    made = {}
    for operator in operators:
        name = operator.dynamo_rule
        if name not in made:
            made[name] = RULES[name](module)
        if made[name] is not None:
            table[operator.__name__] = made[name]
