"""Telling Dynamo about operators without importing it: at once if it is there, else in the moment that it is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import isclass, isfunction, unwrap
from types import ModuleType
from typing import Any

from partita._torch.body_operators import BodyOperator
from partita.errors import OptionError

__all__ = ["inline_in_dynamo"]

_VARIABLES = "torch._dynamo.variables.higher_order_ops"

#: Where the code of the operators is.
_OWN = ("partita.hops.", "partita._torch.body_", "partita._torch.tracing_state", "partita._torch.ambient")


def inline_in_dynamo(operators: Iterable[BodyOperator]) -> None:
    """Dynamo traces a call of each of these operators as what it means in plain Python.

    An operator that Dynamo does not know ends its graph. Where torch has no table of them, this changes nothing.
    """
    if _VARIABLES in sys.modules:
        _register(importlib.import_module(_VARIABLES), operators)  # Waits for a thread that is importing it.
    else:
        sys.meta_path.insert(0, _Awaiting(operators))


class _Awaiting(MetaPathFinder, Loader):
    """Stands before the finders until the module is imported, registers the operators in it, and is gone."""

    def __init__(self, operators: Iterable[BodyOperator]) -> None:
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


def _register(module: Any, operators: Iterable[BodyOperator]) -> None:
    table = getattr(module, "_hop_name_to_variable_class", None)
    base = getattr(module, "TorchHigherOrderOperatorVariable", None)
    if not isinstance(table, dict) or base is None:
        return

    class InlinedOperator(base):  # type: ignore[misc, valid-type]
        """An operator of which Dynamo sees what it does."""

        _HOP_NAME = "partita.hops"

        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            from torch._dynamo.variables.functions import UserFunctionVariable

            operator: Any = self.value
            _leave_alone()
            try:
                mode = [arg.realize().as_python_constant() for arg in args[: operator.mode_count]]
                operator.check(*mode)
            except (NotImplementedError, OptionError):
                return super()._call_function(tx, args, kwargs)  # Ends the graph: the call itself says what is wrong.
            with operator.meaning(*mode) as meaning:
                return UserFunctionVariable(meaning).call_function(tx, args, kwargs)

    table.update((operator.__name__, InlinedOperator) for operator in operators)


@cache
def _leave_alone() -> None:
    """Keeps Dynamo from compiling what runs around a body, where a break in the body has ended the graph."""
    from torch._dynamo import eval_frame

    skip_code = getattr(eval_frame, "skip_code", None)
    if skip_code is None:
        return
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_OWN)]
    classes = [value for module in modules for value in vars(module).values() if isclass(value)]
    for holder in (*modules, *classes):
        for value in vars(holder).values():
            if isfunction(value) and value.__module__.startswith(_OWN):
                skip_code(unwrap(value).__code__)
