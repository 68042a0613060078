"""What the source touches of torch's insides: private names, private attributes, and places that patch something."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

import partita

#: Attributes of Python's own that look private.
PYTHONS = {"_fields", "_getframe", "_replace"}
SOURCE = Path(partita.__file__).parent
LISTED = Path(__file__).with_suffix(".txt")


@cache
def found() -> frozenset[str]:
    """One line for each thing: its kind, and its qualified name, attribute, or patched place."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    own = {name for tree in trees.values() for name in _own_names(tree)}
    lines: set[str] = set()
    for tree in trees.values():
        lines.update(_touched(tree, own))
    modules = {line for line in lines if any(other.startswith(f"{line}.") for other in lines)}
    return frozenset(lines - modules)


def listed() -> set[str]:
    """The lines that were agreed on."""
    return {line for line in LISTED.read_text().splitlines() if line and not line.startswith("#")}


def _touched(tree: ast.Module, own: set[str]) -> Iterator[str]:
    names = _torch_names(tree)
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (f"name {_without_members(name)}" for name in _imported(node) if _is_private(name))
        elif isinstance(node, ast.Attribute) and node not in inner:
            inner.update(_chain(node))
            qualified = _qualified(node, names)
            if qualified is None:
                yield from (f"attribute {name}" for name in _attributes(node, own))
            elif _is_private(qualified):
                yield f"name {_without_members(qualified)}"
        elif isinstance(node, ast.Call):
            yield from _patched(node, names)
            yield from _asked_by_text(node, own, names)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute) and (qualified := _qualified(target, names)) is not None:
                yield f"patch {qualified}"


def _own_names(tree: ast.Module) -> Iterator[str]:
    """The private names that the source defines itself."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _torch_names(tree: ast.Module) -> dict[str, str]:
    """What the names that a module imports from torch stand for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        if isinstance(node, ast.Import) and alias.name.split(".")[0] == "torch":
            yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield f"{node.module}.{alias.name}"


def _chain(node: ast.Attribute) -> Iterator[ast.AST]:
    held: ast.AST = node
    while isinstance(held, ast.Attribute):
        yield held
        held = held.value


def _qualified(node: ast.Attribute, names: dict[str, str]) -> str | None:
    parts = []
    held: ast.expr = node
    while isinstance(held, ast.Attribute):
        parts.append(held.attr)
        held = held.value
    if isinstance(held, ast.Name) and held.id in names:
        return ".".join((names[held.id], *reversed(parts)))
    return None


def _attributes(node: ast.Attribute, own: set[str]) -> Iterator[str]:
    held: ast.expr = node
    while isinstance(held, ast.Attribute):
        if _is_private(held.attr) and held.attr not in own | PYTHONS and not hasattr(torch.ops.aten, held.attr):
            yield held.attr
        held = held.value


def _asked_by_text(node: ast.Call, own: set[str], names: dict[str, str]) -> Iterator[str]:
    """Names of torch's modules, and attributes, that `getattr` and its kin are given as text."""
    match node:
        case ast.Call(
            func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"), args=[owner, ast.Constant(), *_]
        ):
            text = str(ast.literal_eval(node.args[1]))
            qualified = _qualified(ast.Attribute(owner, text), names)
            if qualified is not None and _is_module(qualified.removesuffix(f".{text}")):
                yield from (f"name {_without_members(name)}" for name in [qualified] if _is_private(name))
            elif _is_private(text) and text not in own | PYTHONS:
                yield f"attribute {text}"
        case ast.Call(func=ast.Attribute(attr="attrgetter"), args=[ast.Constant(str(text))]) if _is_private(text):
            yield f"attribute {text}"


def _patched(node: ast.Call, names: dict[str, str]) -> Iterator[str]:
    """Calls that put something into the place of what torch has."""
    match node.func:
        case ast.Name(id="Patch"):
            yield f"patch {ast.unparse(node.args[0])}.{ast.unparse(node.args[1])}"
        case ast.Name(id="setattr"):
            owner = node.args[0]
            if isinstance(owner, ast.Name) and owner.id in names:
                yield f"patch {names[owner.id]}"
            elif isinstance(owner, ast.Attribute) and (qualified := _qualified(owner, names)) is not None:
                yield f"patch {qualified}"
        case ast.Attribute(value=ast.Name(id="patch"), attr="object"):
            yield f"patch {ast.unparse(node.args[0])}.{ast.unparse(node.args[1])}"
        case ast.Attribute(attr="patch") as called:
            if (qualified := _qualified(called, names)) is not None:
                yield f"patch {qualified}"


def _without_members(name: str) -> str:
    """The name as far as the first thing that is no module: what a class or an object has comes with it."""
    path, *parts = name.split(".")
    for part in parts:
        path = f"{path}.{part}"
        if path not in sys.modules and not _is_module(path):
            break
    return path


def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False


def _is_private(name: str) -> bool:
    """Whether a part of a qualified name is private; the names of operators are not torch's insides."""
    return not name.startswith("torch.ops.") and any(
        part.startswith("_") and not part.endswith("__") for part in name.split(".")
    )
