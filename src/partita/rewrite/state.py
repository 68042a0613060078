"""Modules around new graphs: their state, shared without copies, its names, and names of submodules."""

from __future__ import annotations

import copy
import keyword
import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.fx.graph_writer import ADDED_BY_EXPORT, FreeNames, copy_meta, identifier, map_nodes
from partita._torch.fx.lazy_graph_module import LazyModule, blank_module, lazy_module
from partita.analysis.nodes import find
from partita.errors import OptionError
from partita.program.program import StateKeys

StateNaming = Literal["split", "original"]
_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hook" in name)
_OWN_KEYS = frozenset(nn.Module().__dict__) | {
    "_graph",
    "_code",
    "_lineno_map",
    "_prologue_start",
    "_tracer_cls",
    "_tracer_extras",
    "_replace_hooks",
    "_create_node_hooks",
    "_erase_node_hooks",
    "_deepcopy_hooks",
    "_is_impure",
    "_restores_grad",
    "_restores_modes",
    "_is_part",
    # These would run instead of the new graph.
    "forward",
    "_compiled_call_impl",
    # Dynamo's: it promises AOTAutograd a source on every placeholder, which new nodes do not have.
    "_param_name_to_source",
    "meta",
    "shape_env",
}


def module_like(root: GraphModule, graph: Graph, *, restores_modes: bool = False) -> LazyModule:
    """A module without state that runs `graph` by the calling convention, hooks and flags of `root`."""
    # The code generator carries the calling convention; a copy, so that neither graph can change the other's.
    graph.set_codegen(copy.copy(root.graph._codegen))
    module = lazy_module(graph, training=root.training, restores_modes=restores_modes)
    copy_meta(root.meta, module.meta, {})
    module.shape_env = getattr(root, "shape_env", None)
    type(module).__name__ = type(root).__name__
    module.__dict__.update({name: copy.copy(value) for name, value in vars(root).items() if name in _HOOKS})
    share_plain_attributes(root, module)
    return module


def rewrite_in_place(graph: Graph, wanted: Graph, *, kept: Collection[Node]) -> None:
    """Makes `graph` equal to `wanted`: its nodes that are `kept` stay the same objects, by name; others are erased.

    Nodes of `wanted` without a kept node of that name and target are created. Nothing here can fail: `wanted` is a
    graph that was linted.
    """
    by_name = {node.name: node for node in kept}
    output, env = graph.output_node(), dict[Node, Node]()
    metas: dict[int, object] = {}
    for node in wanted.nodes:
        args, kwargs = (map_nodes(arguments, env.__getitem__) for arguments in (node.args, node.kwargs))
        old = output if node.op == "output" else by_name.get(node.name)
        if old is not None and (old.op, old.target) == (node.op, node.target):
            if old is not output:
                output.prepend(old)
            old.args, old.kwargs = args, kwargs
        else:
            with graph.inserting_before(output):
                old = graph.create_node(node.op, node.target, args, kwargs, type_expr=node.type)
            copy_meta(node.meta, old.meta, metas)
        env[node] = old
    stays = frozenset(env.values())
    for node in reversed(list(graph.nodes)):
        if node not in stays:
            graph.erase_node(node)
    for node, old in env.items():
        old.name = node.name  # Distinct in `wanted`, so distinct here, now that other nodes are erased.


def place(root: nn.Module, path: str, value: Any, *, persistent: bool = True) -> None:
    """Registers `value` on `root` under a dotted path, with plain modules on the way."""
    *folders, name = path.split(".")
    module = root
    for folder in folders:
        inner = module._modules.get(folder)
        if inner is None:
            inner = module._modules[folder] = blank_module(training=root.training)
        module = inner
    if isinstance(value, nn.Parameter):
        module._parameters[name] = value
    elif isinstance(value, nn.Module):
        module._modules[name] = value
    elif isinstance(value, torch.Tensor):
        module.register_buffer(name, value, persistent=persistent)
    else:
        module.__dict__[name] = value


def is_persistent(root: nn.Module, path: str) -> bool:
    """Whether the buffer at `path` is saved with the module."""
    folder, _, name = path.rpartition(".")
    return name not in root.get_submodule(folder)._non_persistent_buffers_set


def share_state(source: nn.Module, target: nn.Module, *, without: frozenset[str], room_for: Iterable[str] = ()) -> None:
    """Shares all state of `source` with `target` at the same paths, except for the modules at the paths in `without`.

    Tensors and whole submodules are shared. Only modules that lose a submodule, or will get one at a path in
    `room_for`, are replaced by plain containers: shared modules are never changed.
    """
    opened = {path[:at] for path in (*without, *room_for) for at, letter in enumerate(path) if letter == "."}
    _share(source, target, "", without, opened)


def name_state(module: nn.Module, keys: StateKeys, *, naming: StateNaming) -> None:
    """Makes `module` save and load its state under the names of the original, with `naming="original"`."""
    if naming not in ("split", "original"):
        raise OptionError(f'state_names is "split" or "original", not {naming!r}')
    _remove_renaming(module)
    if naming == "original" and keys.rewrites:
        loading = _Loading(keys, tuple(module.state_dict(keep_vars=True)))
        module.register_state_dict_post_hook(_Saving(keys))
        module.register_load_state_dict_pre_hook(loading)
        module.register_load_state_dict_post_hook(_Reporting(loading))


class MovedByPart:
    """The paths of modules that moved into parts, once it is known which module is called in the place of each."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self.settled: dict[str, str] = {}
        self._by_part: dict[str, dict[str, str]] = defaultdict(dict)
        for path, original in moved.items():
            self._by_part[path.partition(".")[0]][path] = original

    def settle(self, part: str, body: nn.Module, called: nn.Module) -> None:
        """Records that `called`, which may hold the body anywhere, is called in its place."""
        moved = self._by_part.get(part, {})
        if called is body or not moved:
            self.settled |= moved
            return
        names: dict[int, dict[str, str]] = defaultdict(dict)
        for path, original in moved.items():
            local = path[len(part) + 1 :]
            names[id(find(body, local))][local] = original
        self.settled |= {
            f"{part}.{path}": _name_at(path, names[id(module)]) for path, module in _outermost(called, names)
        }


def unique_names(wanted: Iterable[str], root: nn.Module) -> tuple[str, ...]:
    """The wanted names as identifiers, numbered where `root` or another of them has that name."""
    free = FreeNames(lambda name: name in ADDED_BY_EXPORT or hasattr(root, name))
    bases = [identifier(name) or "region" for name in wanted]
    return tuple(
        free.take(f"region_{base}" if base[0].isdigit() or keyword.iskeyword(base) else base) for base in bases
    )


def _share(source: nn.Module, target: nn.Module, prefix: str, without: frozenset[str], opened: set[str]) -> None:
    target._parameters.update(source._parameters)
    target._buffers.update(source._buffers)
    target._non_persistent_buffers_set.update(source._non_persistent_buffers_set)
    for name, child in source._modules.items():
        path = f"{prefix}{name}"
        if path in without:
            continue
        if child is not None and path in opened:
            container = blank_module(training=child.training)
            _share(child, container, f"{path}.", without, opened)
            target._modules[name] = container
        else:
            target._modules[name] = child
    share_plain_attributes(source, target)


def share_plain_attributes(source: nn.Module, target: nn.Module) -> None:
    """Shares other attributes of `source`, which hooks of exported modules, for one, read."""
    for name, value in source.__dict__.items():
        if name not in _OWN_KEYS and name not in target.__dict__:
            target.__dict__[name] = value


def _outermost(root: nn.Module, wanted: Container[int]) -> Iterator[tuple[str, nn.Module]]:
    """The paths of the modules with these ids, without modules inside of them."""
    found = [("", root)]
    while found:
        path, module = found.pop()
        if id(module) in wanted:
            yield path, module
            continue
        below = [
            (f"{path}.{name}" if path else name, child) for name, child in module._modules.items() if child is not None
        ]
        found += reversed(below)


def _name_at(path: str, names: Mapping[str, str]) -> str:
    """The original name of a module at `path`, of several: that of the path in the body that `path` ends with."""
    fitting = (original for local, original in names.items() if f".{path}".endswith(f".{local}"))
    return next(fitting, next(iter(names.values())))


def _remove_renaming(module: nn.Module) -> None:
    """Removes the hooks of an earlier rewrite, which the new keys include."""
    kinds = _Saving | _Loading | _Reporting
    for table in (value for name, value in vars(module).items() if name in _HOOKS and isinstance(value, dict)):
        ours = [key for key, hook in table.items() if isinstance(getattr(hook, "hook", hook), kinds)]
        for key in ours:
            del table[key]


@dataclass
class _Saving:
    """A hook that renames the entries of a saved state dict; torch sets a flag on it, so it is mutable."""

    keys: StateKeys

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for table in (state, getattr(state, "_metadata", {})):
            for key, value in _popped(table, prefix).items():
                table[prefix + self.keys.original(key)] = value


@dataclass
class _Loading:
    """A hook that renames the entries of a state dict before it is loaded."""

    keys: StateKeys
    own: tuple[str, ...]
    #: Where the module is in what is loaded, and the list of errors to which the load in progress adds.
    prefix: str = ""
    errors: list[str] = field(default_factory=list)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *report: Any) -> None:
        self.prefix, self.errors = prefix, report[-1]
        entries = _popped(state, prefix)
        state.update({prefix + key: value for key, value in self.keys.from_original(entries, self.own).items()})
        versions = getattr(state, "_metadata", None) or {}
        for path, _ in module.named_modules(remove_duplicate=False):
            # Modules look up the version of their state by their current path.
            original = prefix + self.keys.original(path)
            if original in versions:
                versions.setdefault(prefix + path, versions[original])


@dataclass
class _Reporting:
    """A hook that names what is missing or does not fit by the names of the original, after a state dict was loaded."""

    loading: _Loading

    def __call__(self, module: nn.Module, found: Any) -> None:
        prefix, errors, self.loading.errors = self.loading.prefix, self.loading.errors, []
        original = {prefix + key: prefix + self.loading.keys.original(key) for key in self.loading.own}
        # A module that several regions call is missing once.
        found.missing_keys[:] = dict.fromkeys(original.get(key, key) for key in found.missing_keys)
        if errors:
            names = "|".join(map(re.escape, original))
            known = re.compile(rf"(?<![\w.])({names})(?![\w.])")
            errors[:] = [known.sub(lambda match: original[match[1]], text) for text in errors]


def _popped(table: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Pops the entries below `prefix`; their keys without it."""
    keys = [key for key in table if key.startswith(prefix)]
    return {key[len(prefix) :]: table.pop(key) for key in keys}
