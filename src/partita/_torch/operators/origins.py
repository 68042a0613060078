"""Where the operators of other packages come from, so that what was compiled with them is not used with others."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from types import FunctionType
from typing import Any

from torch._ops import OpOverload


def version_behind(op: OpOverload) -> str | None:
    """The installed package, with its version, whose functions define an operator; None where that says too little.

    That is known of operators made by `torch.library.custom_op`, of functions that a package holds under their names.
    """
    from torch._library.custom_ops import OPDEFS

    name = f"{op.namespace}::{op.name().partition('::')[2].partition('.')[0]}"
    definition = OPDEFS.get(name)
    functions = [] if definition is None else list(_functions(vars(definition).values()))
    packages = {_package(function) for function in functions}
    if len(packages) != 1 or None in packages:
        return None
    (package,) = packages
    return None if package is None else _installed_version(package)


def _functions(values: Any) -> Iterator[FunctionType]:
    """The functions among some values and in tables of them, but for those that torch puts around them."""
    for value in values:
        if isinstance(value, Mapping):
            yield from _functions(value.values())
        elif isinstance(value, FunctionType) and value.__module__.split(".")[0] != "torch":
            yield value


def _package(function: FunctionType) -> str | None:
    """The package of a function; None for a closure or a lambda, which is another one in each process."""
    return None if "<" in function.__qualname__ else function.__module__.split(".")[0]


@cache
def _installed_version(package: str) -> str | None:
    """The name and version of a package, if what is imported is what was installed."""
    try:
        found = distribution(package)
    except (PackageNotFoundError, ValueError):
        return None
    imported = getattr(sys.modules.get(package), "__file__", None)
    installed = Path(str(found.locate_file(package))).resolve()
    if imported is None or installed not in Path(imported).resolve().parents or _is_editable(found):
        return None
    return f"{package} {found.version}"


def _is_editable(found: Distribution) -> bool:
    """Whether a package was installed as a link to a folder, the contents of which change while its version stays."""
    origin = found.read_text("direct_url.json")
    return origin is not None and bool(json.loads(origin).get("dir_info", {}).get("editable"))
