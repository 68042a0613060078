"""Naming the state of a rewritten module: by where things went, or as the original called them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from partita.errors import OptionError
from partita.graphs.attributes import find
from partita.graphs.state_keys import StateKeys

__all__ = ["MovedByPart", "StateNaming", "name_state"]

StateNaming = Literal["split", "original"]


def name_state(module: nn.Module, keys: StateKeys, *, naming: StateNaming) -> None:
    """Lets `module` save and load its state under the original's names, where `naming` asks for that."""
    if naming not in ("split", "original"):
        raise OptionError(f'state_names is "split" or "original", not {naming!r}')
    _forget_renaming(module)
    if naming == "original" and keys.rewrites:
        own = tuple(module.state_dict(keep_vars=True))
        module.register_state_dict_post_hook(_Saving(keys))
        module.register_load_state_dict_pre_hook(_Loading(keys, own))


class MovedByPart:
    """The modules that moved into parts, by where they are once it is known what is called in the place of each."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self.settled: dict[str, str] = {}
        self._by_part: dict[str, dict[str, str]] = defaultdict(dict)
        for path, original in moved.items():
            self._by_part[path.partition(".")[0]][path] = original

    def settle(self, part: str, body: nn.Module, called: nn.Module) -> None:
        """Notes that `called`, which may hold the body anywhere, is called in its place."""
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


def _outermost(root: nn.Module, wanted: Container[int]) -> Iterator[tuple[str, nn.Module]]:
    """The paths of the modules with these ids, but not of what is inside them, whose path follows from theirs."""
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
    """Which of the original names of one module is the one at `path`: that of the place in the body it ends in."""
    fitting = (original for local, original in names.items() if f".{path}".endswith(f".{local}"))
    return next(fitting, next(iter(names.values())))


@dataclass
class _Saving:
    """A hook that renames what a module has just put into a state dict; torch writes a flag on it, so it is open."""

    keys: StateKeys

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for table in (state, getattr(state, "_metadata", {})):
            for key, value in _taken(table, prefix).items():
                table[prefix + self.keys.original(key)] = value


@dataclass
class _Loading:
    """A hook that renames what a module is about to take from a state dict."""

    keys: StateKeys
    own: tuple[str, ...]

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        given = _taken(state, prefix)
        state.update({prefix + key: value for key, value in self.keys.from_original(given, self.own).items()})
        versions = getattr(state, "_metadata", None) or {}
        for path, _ in module.named_modules(remove_duplicate=False):
            # Modules look up the version of their state by where they are now.
            original = prefix + self.keys.original(path)
            if original in versions:
                versions.setdefault(prefix + path, versions[original])


def _taken(table: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The entries below `prefix`, without it, taken out of the table."""
    keys = [key for key in table if key.startswith(prefix)]
    return {key[len(prefix) :]: table.pop(key) for key in keys}


def _forget_renaming(module: nn.Module) -> None:
    """Takes back the renaming of an earlier rewrite, which the new keys include."""
    tables: tuple[Mapping[int, Any], ...] = (module._state_dict_hooks, module._load_state_dict_pre_hooks)
    for table in tables:
        assert isinstance(table, dict)
        ours = [key for key, hook in table.items() if isinstance(getattr(hook, "hook", hook), _Saving | _Loading)]
        for key in ours:
            del table[key]
