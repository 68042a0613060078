"""Policies and treatments by name: names are those of the classes, options those of their fields.

`capability:inductor,min_size=4` is `ByCapability("inductor", min_size=4)`. Values are read as the types of the fields
say, and nothing is evaluated. A value without a name belongs to the option before it, or to the first one.
`blocks.*=recompute` is a treatment for the regions whose name or label fits.
"""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from partita_cli.errors import CommandError

if TYPE_CHECKING:
    from partita import Region

Kind: TypeAlias = Literal["policy", "treatment", "keep"]

#: The part of the class names that says what kind it is.
_PREFIXES: dict[Kind, str] = {"policy": "By", "treatment": "", "keep": "Keep"}
#: Other names of options.
_ALIASES = {("ByCapability", "backend"): "capabilities", ("ByCapability", "backends"): "capabilities"}
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Accepted:
    """The plain values that the type of a field accepts."""

    scalars: frozenset[type] = frozenset()
    words: tuple[str, ...] = ()
    takes_none: bool = False
    #: What each of several values may be.
    items: Accepted | None = None
    is_keep: bool = False

    @property
    def anything(self) -> bool:
        """Whether a command line can set it at all."""
        return bool(self.scalars or self.words or self.items or self.is_keep)

    def __str__(self) -> str:
        found = [_SCALARS[kind] for kind in (bool, int, float, str) if kind in self.scalars]
        found += [repr(word) for word in self.words]
        if self.items is not None and self.items.anything:
            several = f"{self.items}s" if str(self.items) in _SCALARS.values() else f"several of {self.items}"
            found = [one for one in found if one != str(self.items)] + [several]
        if self.is_keep:
            found.append("what to keep, see partita list keep")
        if self.takes_none:
            found.append("none")
        return " or ".join(found)

    def value(self, texts: Sequence[str]) -> Any:
        """The value that the texts stand for; raises ValueError where they do not fit."""
        if self.is_keep:
            return choose("keep", ",".join(texts))
        if len(texts) == 1:
            found = self._scalar(texts[0])
            if found is not MISSING:
                return found
        if self.items is None or not self.items.anything:
            raise ValueError
        return tuple(self.items.value([text]) for text in texts)

    def _scalar(self, text: str) -> Any:
        word = text.strip().lower()
        if self.takes_none and word == "none":
            return None
        if text in self.words:
            return text
        if bool in self.scalars and word in _WORDS:
            return _WORDS[word]
        for kind in (int, float):
            if kind in self.scalars:
                try:
                    return kind(text)
                except ValueError:
                    continue
        return text if str in self.scalars else MISSING


_SCALARS: dict[type, str] = {bool: "true or false", int: "whole number", float: "number", str: "text"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option: a field of the class."""

    name: str
    accepts: Accepted
    is_required: bool
    default: str
    #: What it is, where only Python can set it.
    in_python: str = "a function"


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy, a treatment or what a recomputed region keeps, under its name on the command line."""

    kind: Kind
    name: str
    cls: type

    @property
    def summary(self) -> str:
        """The first sentence about it."""
        return (self.cls.__doc__ or "").strip().partition("\n")[0]

    @property
    def origin(self) -> str:
        """Where it comes from."""
        return f"{self.cls.__module__.partition('.')[0]}, {self.cls.__name__}"

    @property
    def options(self) -> tuple[Option, ...]:
        """The options in order, those too that only Python can set."""
        hints = get_type_hints(self.cls)
        return tuple(_option(one, hints[one.name]) for one in fields(self.cls) if not one.name.startswith("_"))

    @property
    def only_in_python(self) -> Option | None:
        """The option because of which it cannot be made here: it needs a function."""
        return next((one for one in self.options if one.is_required and not one.accepts.anything), None)

    def made(self, values: dict[str, list[str]]) -> Any:
        """An instance with these options."""
        taken: dict[str, Any] = {}
        for name, texts in values.items():
            option = self._option(name)
            try:
                taken[option.name] = option.accepts.value(texts)
            except ValueError:
                raise CommandError(
                    f"{option.name} of {self.kind} {self.name} takes: {option.accepts}; not {','.join(texts)!r}"
                ) from None
        for option in self.options:
            if option.is_required and option.name not in taken:
                raise CommandError(
                    f"{self.kind} {self.name} needs {option.name}, for example {self.name}:{option.name}=...; see "
                    f"partita list {self.name}"
                )
        rest: Sequence[Any] = ()
        for parameter in signature(self.cls).parameters.values():
            if parameter.kind is Parameter.VAR_POSITIONAL:
                rest = taken.pop(parameter.name, ())
        return self.cls(*rest, **taken)

    def _option(self, name: str) -> Option:
        known = {option.name: option for option in self.options}
        option = known.get(_ALIASES.get((self.cls.__name__, name), name.replace("-", "_")))
        settable = [one.name for one in self.options if one.accepts.anything]
        if option is None:
            raise CommandError(f"{self.kind} {self.name} has no option {name!r}{_nearest(name, settable)}")
        if not option.accepts.anything:
            raise CommandError(
                f"option {name!r} of {self.kind} {self.name} is {option.in_python}, and is set in Python only"
            )
        return option


def choose(kind: Kind, text: str) -> Any:
    """The policy or treatment that a text such as `size:parts=4` names."""
    name, _, rest = text.partition(":")
    name = name.strip()
    known = choices(kind)
    if name not in known:
        usable = [one.name for one in known.values() if one.only_in_python is None]
        by_class = {choice.cls.__name__.lower(): choice.name for choice in known.values()}
        near = by_class.get(name.lower())
        hint = f"; it is called {near!r} here" if near else _nearest(name, usable)
        raise CommandError(f"there is no {kind} {name!r}{hint}")
    choice = known[name]
    needed = choice.only_in_python
    if needed is not None:
        raise CommandError(
            f"{kind} {name} needs {needed.name}, which is {needed.in_python}: use {choice.cls.__name__} in Python"
        )
    return choice.made(_values(choice, rest))


@dataclass(frozen=True, slots=True)
class Treatments:
    """A treatment for all regions, and others for those whose name or label fits a pattern; the last that fits counts.

    In a pattern, `*` stands for any text, `?` for any character, and `[ab]` for one of these.
    """

    default: Any
    rules: tuple[tuple[str, Any], ...] = ()

    def of(self, region: Region) -> Any:
        """The treatment of a region."""
        return next((treatment for pattern, treatment in reversed(self.rules) if _fits(region, pattern)), self.default)

    def check_used(self, regions: Iterable[Region]) -> None:
        """Raises for a pattern that fits no region, which is a misspelled name."""
        known = list(regions)
        for pattern, _ in self.rules:
            if not any(_fits(region, pattern) for region in known):
                names = list(dict.fromkeys(name for region in known for name in _names_of(region)))
                shown = [*names[:_SHOWN], *(["others"] if len(names) > _SHOWN else [])]
                near = _wider(pattern, names) or get_close_matches(pattern, names, n=3)
                hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"there are {', '.join(shown)}"
                raise CommandError(
                    f"there is a treatment for {pattern!r}, but no region has such a name or label; "
                    f"{hint if names else 'the policy found no region'}"
                )


def _wider(pattern: str, names: Sequence[str]) -> list[str]:
    """The pattern with any text before it, or around it, if that fits; names of regions are those of whole paths."""
    for wider in (f"*{pattern}", f"*{pattern.strip('*')}*"):
        if pattern.strip("*") and any(fnmatchcase(name, wider) for name in names):
            return [wider]
    return []


#: How many regions an error names.
_SHOWN = 6


def _fits(region: Region, pattern: str) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for name in _names_of(region))


def _names_of(region: Region) -> tuple[str, ...]:
    return (region.name,) if region.label is None else (region.name, str(region.label))


def choose_treatments(texts: Sequence[str]) -> Treatments:
    """The treatments that texts such as `lower:inductor` and `blocks.*=recompute` name; `call` if none is for all."""
    rules: list[tuple[str, Any]] = []
    for_all: list[str] = []
    for text in texts:
        pattern, sign, name = text.partition("=")
        if sign and ":" not in pattern:  # Otherwise the sign belongs to an option: lower:inductor,dynamic=true.
            if not pattern:
                raise CommandError(f"{text!r} says no regions before '='; write 'blocks.*={name}', or only {name!r}")
            rules.append((pattern, choose("treatment", name)))
        else:
            for_all.append(text)
    if len(for_all) > 1:
        raise CommandError(
            f"the treatments {for_all[0]!r} and {for_all[1]!r} are both for all regions; write 'REGIONS={for_all[1]}', "
            "with the name, a pattern or the label of those that the second one is for"
        )
    return Treatments(choose("treatment", for_all[0] if for_all else "call"), tuple(rules))


@cache
def choices(kind: Kind) -> dict[str, Choice]:
    """All choices of a kind, by name."""
    import partita.policies
    import partita.treatments

    module: Any = partita.policies if kind == "policy" else partita.treatments
    exported: list[Any] = [getattr(module, name) for name in module.__all__]
    classes = [one for one in exported if isinstance(one, type) and is_dataclass(one)]
    found = [cls for cls in classes if kind == "policy" or cls.__name__.startswith("Keep") == (kind == "keep")]
    named = {_name(kind, cls.__name__): cls for cls in found}
    return {name: Choice(kind, name, named[name]) for name in sorted(named)}


def find(name: str) -> list[Choice]:
    """The policies, treatments and choices of what to keep that have this name."""
    return [found for kind in _PREFIXES if (found := choices(kind).get(name)) is not None]


def _name(kind: Kind, class_name: str) -> str:
    """ByCapability is capability, AroundOperators around-operators."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", class_name.removeprefix(_PREFIXES[kind])).lower()


def _values(choice: Choice, text: str) -> dict[str, list[str]]:
    """The texts for each option."""
    values: dict[str, list[str]] = {}
    names = [option.name for option in choice.options]
    current = names[0] if names else ""
    for word in filter(None, text.split(",")):
        name, sign, value = word.partition("=")
        if sign and ":" not in name:  # Otherwise it is an option of a value: keep=expensive:flops_per_byte=2.
            current, word = name.strip(), value
            if current in values:
                raise CommandError(f"{choice.kind} {choice.name} has the option {current!r} twice")
            values[current] = []
        elif not names:
            raise CommandError(f"{choice.kind} {choice.name} has no options, and {word!r} is one")
        values.setdefault(current, []).append(word)
    return values


def _option(one: Field[Any], hint: Any) -> Option:
    accepts = Accepted(is_keep=True) if one.name == "keep" else accepted(hint)
    if one.default_factory is not MISSING:
        default = one.default_factory()
    elif one.default is not MISSING:
        default = one.default
    else:
        return Option(one.name, accepts, is_required=True, default="", in_python=_in_python(hint))
    shown = "none" if default is None or default == () else str(default)
    shown = shown.lower() if isinstance(default, bool) else shown
    return Option(one.name, accepts, is_required=False, default=shown, in_python=_in_python(hint))


def _in_python(hint: Any) -> str:
    """In a word, what is no plain value: a policy is a function that returns a partition."""
    returned = get_args(hint)[-1] if get_args(hint) else None
    return "a policy" if getattr(returned, "__name__", "") == "Partition" else "a function"


def accepted(hint: Any) -> Accepted:
    """The plain values of a type; functions, classes and other objects are not among them."""
    parts = list(_members(hint))
    scalars = frozenset(part for part in parts if part in _SCALARS)
    if object in parts:  # Any value: a number, a truth value or a text.
        scalars = frozenset(_SCALARS)
    words = tuple(str(word) for part in parts if get_origin(part) is Literal for word in get_args(part))
    several = [part for part in parts if _is_collection(part)]
    items = accepted(get_args(several[0])[0]) if several and get_args(several[0]) else None
    return Accepted(scalars, words, types.NoneType in parts, items)


def _members(hint: Any) -> Iterator[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _members(part)
    else:
        yield hint


def _is_collection(hint: Any) -> bool:
    return get_origin(hint) in (tuple, list, set, frozenset, Collection, Sequence)


def _nearest(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, n=3)
    if near:
        return f"; did you mean {', '.join(map(repr, near))}?"
    return f"; there are {', '.join(names)}" if names else ""
