"""Options of Inductor: sorted pairs, so that equal ones are equal, and known to it, so that none is lost on a typo."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeAlias

from partita._torch.backend_inductor import inductor_options
from partita.errors import OptionError

__all__ = ["Options", "checked_options", "options_for_inductor"]

#: Names and values, sorted by name; lists are tuples.
Options: TypeAlias = tuple[tuple[str, object], ...]


def checked_options(options: Mapping[str, object] | Options) -> Options:
    """The options as sorted pairs, if Inductor knows them all and their values have the right types."""
    if not options:
        return ()
    try:
        given = {name.replace("-", "_"): value for name, value in dict(options).items()}
    except (AttributeError, TypeError, ValueError):
        raise OptionError(f"options are a mapping from names to values, not {options!r}") from None
    known = inductor_options()
    return tuple(sorted((name, _checked(name, value, known)) for name, value in given.items()))


def options_for_inductor(options: Options) -> dict[str, object]:
    """The options as Inductor takes them, beside those that keep eager's numbers unless they say otherwise."""
    known = inductor_options() if options else {}
    given = {name: [*value] if isinstance(known[name], list) else value for name, value in options}  # type: ignore[misc]
    return {**_EAGERS_NUMBERS, **given}


def _checked(name: str, value: object, known: Mapping[str, object]) -> object:
    if name not in known:
        near = get_close_matches(name, known, n=3)
        hint = f"; did you mean {', '.join(map(repr, near))}?" if near else "; see torch._inductor.config"
        raise OptionError(f"Inductor has no option {name!r}{hint}")
    default = known[name]
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if isinstance(value, list):
        value = tuple(value)
    wanted = tuple if isinstance(default, list) else type(default)
    if isinstance(default, bool | int | float | str | list) and type(value) is not wanted:
        raise OptionError(f"Inductor's option {name!r} is a {type(default).__name__}, not {value!r}")
    try:
        hash(value)
    except TypeError:
        raise OptionError(f"the value {value!r} of option {name!r} can be changed; give one that cannot") from None
    return value


#: Random numbers from eager's generator, and values of few bits rounded wherever eager rounds them.
_EAGERS_NUMBERS = {"fallback_random": True, "emulate_precision_casts": True}
