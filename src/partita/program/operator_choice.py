"""Operator selection: which calls match an operator, a function, a module class or a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, final

import torch
from torch import nn
from torch.fx import Node

from partita._torch.operator_schemas import OPERATORS, is_higher_order, signatures_of, signatures_of_method
from partita.analysis.imported_names import imported
from partita.analysis.nodes import find
from partita.errors import OptionError

#: An operator or overload, a Python function, a module class, or a name: "aten.mm", "vllm.unified_attention",
#: "package.function", the name of a tensor method or of a module class.
Operator: TypeAlias = Callable[..., Any] | type[nn.Module] | str


def checked_operators(operators: object) -> tuple[Operator, ...]:
    """The operators as a tuple; a single one needs no container."""
    several = tuple(operators) if isinstance(operators, tuple | list | set | frozenset) else (operators,)
    if not several or not all(callable(one) or (isinstance(one, str) and one) for one in several):
        raise OptionError(
            f"operators are operators, functions, module classes or their names, not {operators!r}; "
            "for example torch.ops.aten.scaled_dot_product_attention"
        )
    long = next((one for one in several if isinstance(one, str) and len(one) > _LONGEST_NAME), None)
    if long is not None:
        raise OptionError(f"no operator has a name of {len(long)} letters, as the one that begins {long[:40]!r}")
    return several


_LONGEST_NAME = 1000


@final
class Chosen:
    """Whether a node calls one of the chosen operators, under any of the names that tracers use for it."""

    def __init__(self, operators: Iterable[Operator], root: nn.Module) -> None:
        self._root = root
        self._names: set[str] = set()
        self._functions: list[Any] = []
        self._classes: list[type] = []
        self._known: dict[tuple[str, Any], bool] = {}
        for operator in operators:
            self._add(operator)

    def __contains__(self, node: Node) -> bool:
        key = (node.op, node.target)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._is_chosen(node)
        return known

    def _add(self, operator: Operator) -> None:
        if isinstance(operator, str):
            self._names.add(operator.replace("::", ".").removeprefix("torch.ops."))
            found = imported(operator)
            if found is not None:
                self._add(found)
        elif isinstance(operator, type) and issubclass(operator, nn.Module):
            self._classes.append(operator)
        elif isinstance(operator, _OVERLOAD | _PACKET) or is_higher_order(operator):
            self._names.add(str(operator))
        else:
            self._functions.append(operator)
            self._names.update(_schema_names(operator))
            self._names.update(_custom_name(operator))

    def _is_chosen(self, node: Node) -> bool:
        target: Any = node.target
        if node.op == "call_method":
            return not self._names.isdisjoint((target, *_names_of_method(target)))
        if node.op == "call_module":
            module = type(find(self._root, target))
            names = (module.__name__, f"{module.__module__}.{module.__qualname__}")
            return any(issubclass(module, one) for one in self._classes) or not self._names.isdisjoint(names)
        return any(target is one for one in self._functions) or not self._names.isdisjoint(_names_of_function(target))


def plain_name(node: Node) -> str:
    """The bare name of what `node` calls, the same for an operator, its overloads, its function and its method."""
    target: Any = node.target
    if isinstance(target, str):
        return target
    schemas = _schema_names(target)
    return schemas[0].rpartition(".")[2] if schemas else str(getattr(target, "__name__", target))


def choosable_name(node: Node, root: nn.Module) -> str:
    """The shortest name by which the call of `node` can be chosen."""
    target: Any = node.target
    if node.op == "call_module":
        return type(find(root, target)).__name__
    if isinstance(target, str):
        return target
    schemas = _schema_names(target)
    if schemas or isinstance(target, _OVERLOAD | _PACKET) or is_higher_order(target):
        return schemas[0] if schemas else str(target)
    return f"{target.__module__}.{getattr(target, '__qualname__', '')}"


def _names_of_function(target: Any) -> set[str]:
    names = {str(target), *_schema_names(target), f"{target.__module__}.{getattr(target, '__qualname__', '')}"}
    if isinstance(target, _PACKET) and len(target.overloads()) == 1:
        names.add(f"{target}.{target.overloads()[0]}")
    for name in () if isinstance(target, _PACKET | _OVERLOAD) else _schema_names(target):
        space, _, base = name.partition(".")
        packet = getattr(getattr(torch.ops, space), base, None)
        if isinstance(packet, _PACKET) and len(packet.overloads()) == 1:  # The function can mean no other overload.
            names.add(f"{packet}.{packet.overloads()[0]}")
    if is_higher_order(target):
        names.add(f"higher_order.{target}")
    return names


def _names_of_method(name: str) -> tuple[str, ...]:
    return tuple(signature.name.replace("::", ".") for signature in signatures_of_method(name))


def _schema_names(target: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(signature.name.replace("::", ".") for signature in signatures_of(target)))


def _custom_name(operator: Any) -> tuple[str, ...]:
    """The name of what `torch.library.custom_op` returns; graphs hold the operator that it registers."""
    name = getattr(operator, "_qualname", None)
    return (name.replace("::", "."),) if isinstance(name, str) and "::" in name else ()


_OVERLOAD, _PACKET = OPERATORS
