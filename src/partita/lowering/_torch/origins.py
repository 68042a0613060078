"""Where the code that a body calls comes from, so that what was compiled with it is not used with other code."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node


def foreign_code(body: GraphModule) -> Iterator[str]:
    """What a body calls that is neither torch's nor Python's own, nor an operator of an installed package.

    Its name does not say what it does elsewhere.
    """
    for module in body.modules():
        if isinstance(module, GraphModule):
            yield from (
                f"{node.target}" for node in module.graph.nodes if not _is_torchs(node) and _package_of(node) is None
            )
        elif not _is_of(type(module), _PACKAGES):
            yield type(module).__qualname__


def packages_behind(body: GraphModule) -> list[str]:
    """The other packages, with their versions, that define operators which a body calls."""
    nodes = (node for module in body.modules() if isinstance(module, GraphModule) for node in module.graph.nodes)
    return sorted({found for node in nodes if not _is_torchs(node) and (found := _package_of(node)) is not None})


def _package_of(node: Node) -> str | None:
    is_operator = isinstance(node.target, OpOverload) and all(map(_is_data, (*node.args, *node.kwargs.values())))
    return _version_behind(node.target) if is_operator else None  # type: ignore[arg-type]


_PACKAGES = ("torch", "_operator", "operator", "math", "builtins", "partita")
_NAMESPACES = ("aten", "prims", "_c10d_functional", "partita")


def _is_torchs(node: Node) -> bool:
    target: Any = node.target
    if not all(map(_is_data, (*node.args, *node.kwargs.values()))):
        return False
    if node.op != "call_function":
        return True
    if isinstance(target, OpOverload | OpOverloadPacket):
        return str(target).split(".", maxsplit=1)[0] in _NAMESPACES
    if isinstance(target, HigherOrderOperator):
        return _is_of(type(target), ("torch", "partita"))
    # A function that a module holds under its name; a closure or a lambda is another one in each process.
    return _is_of(target, _PACKAGES) and "<" not in getattr(target, "__qualname__", "<")


def _is_of(value: Any, packages: Sequence[str]) -> bool:
    return str(getattr(value, "__module__", "")).split(".", maxsplit=1)[0] in packages


def _is_data(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    if isinstance(value, slice):
        return all(map(_is_data, (value.start, value.stop, value.step)))
    return isinstance(value, _DATA)


_DATA = (
    Node,
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    nn.Module,
)


def _version_behind(op: OpOverload) -> str | None:
    """The installed package, with its version, whose functions define an operator; None where that says too little.

    That is known of operators made by `torch.library.custom_op`, of functions that a package holds under their names.
    """
    from torch._library.custom_ops import OPDEFS

    name = f"{op.namespace}::{op.name().partition('::')[2].partition('.')[0]}"
    definition = OPDEFS.get(name)
    functions = [] if definition is None else list(_functions(vars(definition).values()))
    modules = {_module(function) for function in functions}
    named = frozenset(module for module in modules if module is not None)
    packages = {module.partition(".")[0] for module in named}
    return _installed_version(*packages, named) if len(packages) == 1 and None not in modules else None


def _functions(values: Any) -> Iterator[FunctionType]:
    """The functions among some values and in tables of them, but for those that torch puts around them."""
    for value in values:
        if isinstance(value, Mapping):
            yield from _functions(value.values())
        elif isinstance(value, FunctionType) and value.__module__.split(".")[0] != "torch":
            yield value


def _module(function: FunctionType) -> str | None:
    """The module of a function; None for a closure or a lambda, which is another one in each process."""
    return None if "<" in function.__qualname__ else function.__module__


@cache
def _installed_version(package: str, modules: frozenset[str]) -> str | None:
    """The name and version of a package, if these modules were imported from files that were installed with it."""
    try:
        found = distribution(package)
    except (PackageNotFoundError, ValueError):
        return None
    files = [getattr(sys.modules.get(module), "__file__", None) for module in modules]
    if _is_editable(found) or not all(file is not None and _is_recorded(Path(file), found) for file in files):
        return None
    return f"{package} {found.version}"


def _is_recorded(file: Path, found: Distribution) -> bool:
    """Whether an installer has written a file; one in a folder of sources changes while the version there stays."""
    rows = csv.reader((found.read_text("RECORD") or "").splitlines())
    alike = (row[0] for row in rows if row and PurePosixPath(row[0]).name == file.name)
    return any(Path(str(found.locate_file(path))).resolve() == file.resolve() for path in alike)


def _is_editable(found: Distribution) -> bool:
    """Whether a package was installed as a link to a folder, the contents of which change while its version stays."""
    origin = found.read_text("direct_url.json")
    return origin is not None and bool(json.loads(origin).get("dir_info", {}).get("editable"))
