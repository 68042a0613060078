"""How Dynamo traces our operators: as their meaning in plain Python, or as calls with a traced body.

The rules are registered without importing Dynamo: at once if it is imported already, otherwise when it is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import isclass, isfunction, unwrap
from types import ModuleType
from typing import Any, Protocol

from partita.errors import OptionError

#: Dynamo must not compile the code of this module, which runs around a body after a graph break inside it.
DYNAMO_SKIPS = True


_VARIABLES = "torch._dynamo.variables.higher_order_ops"


class TracedByRule(Protocol):
    """An operator that names the rule by which Dynamo traces its calls."""

    __name__: str
    dynamo_rule: str


def register_with_dynamo(operators: Iterable[TracedByRule]) -> None:
    """Registers the rules by which Dynamo traces calls of these operators.

    A call of an unknown operator is a graph break. If torch has no table of operators, nothing happens.
    """
    if _VARIABLES in sys.modules:
        _register(importlib.import_module(_VARIABLES), operators)  # Waits for a thread that is importing it.
    else:
        sys.meta_path.insert(0, _RegisterOnImport(operators))


class _RegisterOnImport(MetaPathFinder, Loader):
    """A finder that registers the operators when Dynamo's module is imported, and removes itself."""

    def __init__(self, operators: Iterable[TracedByRule]) -> None:
        self._operators = tuple(operators)
        self._loader: Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _VARIABLES:
            return None
        # A new list: other threads may be iterating over the old one.
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


def _inlined(module: Any) -> type | None:
    """A call is traced as the operator's meaning."""
    base = getattr(module, "TorchHigherOrderOperatorVariable", None)
    if base is None:
        return None

    class InlinedOperator(base):  # type: ignore[misc, valid-type]
        """An operator that Dynamo inlines."""

        _HOP_NAME = "partita.hops"

        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            from torch._dynamo.variables.functions import UserFunctionVariable

            operator: Any = self.value
            _skip_own_code()
            try:
                args, kwargs = operator.bound(args, kwargs)
                mode = [arg.realize().as_python_constant() for arg in args[: operator.mode_count]]
                operator.check(*mode)
            except (NotImplementedError, OptionError):
                return super()._call_function(tx, args, kwargs)  # A graph break: the call itself raises the error.
            with operator.meaning(*mode) as meaning:
                return UserFunctionVariable(meaning).call_function(tx, args, kwargs)

    return InlinedOperator


def _kept_as_call(base_name: str, *, unneeded: tuple[str, ...] = ()) -> Callable[[Any], type | None]:
    """A call is kept, with the body that Dynamo has traced; tensors that the body closes over become operands.

    The call keeps all keywords but the `unneeded` ones, as torch does for its own operators.
    """

    def rule(module: Any) -> type | None:
        base = getattr(module, base_name, None)
        outermost: Any = getattr(module, "TorchHigherOrderOperatorVariable", None)
        if base is None or outermost is None:
            return None

        class KeptOperator(base):  # type: ignore[misc, valid-type]
            """An operator whose calls Dynamo keeps in the graph."""

            _HOP_NAME = "partita.hops"

            def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
                _skip_own_code()
                operator: Any = self.value
                try:
                    args, kwargs = operator.bound(args, kwargs)
                except OptionError:
                    # A graph break: the call itself raises the error.
                    return outermost._call_function(self, tx, args, kwargs)
                kept = {name: value for name, value in kwargs.items() if name not in unneeded}
                _finish_graph(tx.output, operator)
                return super()._call_function(tx, args, kept)

        return KeptOperator

    return rule


def _finish_graph(output: Any, operator: Any) -> None:
    """Lets the operator annotate the complete graph for compilers; export does not need that."""
    finish = getattr(operator, "finish_graph", None)
    if finish is not None and not output.export and finish not in output.register_finalizer_fns:
        output.add_graph_finalizer(finish)


#: By name of the rule: from Dynamo's module of higher-order operators to the class for its table.
RULES: Mapping[str, Callable[[Any], type | None]] = {
    "inlined": _inlined,
    "wrapped": _kept_as_call("WrapHigherOrderVariable"),
    # Never reentrant, whatever the keyword says.
    "checkpoint": _kept_as_call("CheckpointHigherOrderVariable", unneeded=("use_reentrant",)),
}


def _skip_own_code() -> None:
    """Keeps Dynamo from compiling the code that runs around a body after a graph break inside it.

    That is the code of all modules that set `DYNAMO_SKIPS`.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("partita.") and getattr(module, "DYNAMO_SKIPS", False):
            _skip_code_of(name)


@cache
def _skip_code_of(name: str) -> None:
    from torch._dynamo import eval_frame

    skip_code = getattr(eval_frame, "skip_code", None)
    if skip_code is None:
        return
    module = sys.modules[name]
    classes = [value for value in vars(module).values() if isclass(value) and value.__module__ == name]
    for holder in (module, *classes):
        for value in vars(holder).values():
            if isfunction(value) and value.__module__ == name:
                skip_code(unwrap(value).__code__)
