"""`partita list`: policies, treatments and backends, with their options and where they come from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields, is_dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any

import typer

from partita_cli.choices import Choice, Kind, choices, find
from partita_cli.errors import CommandError
from partita_cli.options import POLICIES, TREATMENTS, AsJson, Imports, examples
from partita_cli.output import say, say_json, table, title, working
from partita_cli.sources import import_modules

EPILOG = examples(
    "partita list",
    "partita list policies",
    "partita list capability",
    "partita list backends --json",
)
_KINDS: dict[str, Kind] = {"policies": "policy", "treatments": "treatment", "keep": "keep"}
_GROUPS = (*_KINDS, "backends")


def _completed(incomplete: str) -> list[str]:
    return [name for name in (*_GROUPS, *POLICIES, *TREATMENTS) if name.startswith(incomplete)]


def command(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[WHAT]",
            help="policies, treatments, keep (what a recomputed region keeps), backends, or the name of one.",
            autocompletion=_completed,
        ),
    ] = None,
    imports: Imports = None,
    json: AsJson = False,
) -> None:
    """List policies, treatments and backends; or say everything about one: its options and their types."""
    with working("looking"):
        import_modules(imports)
        groups = _GROUPS if what is None else (what,) if what in _GROUPS else ()
        found = {group: _entries(group) for group in groups}
        one = _about(what) if what is not None and not groups else []
    if json:
        say_json(found if groups else one)
        return
    for number, (group, entries) in enumerate(found.items()):
        title(f"{'' if not number else chr(10)}{group}")
        table([row for entry in entries for row in _rows(entry, with_options=what is not None)], indent="  ")
    for number, entry in enumerate(one):
        if number:
            say()
        _print_one(entry)


def _rows(entry: dict[str, Any], *, with_options: bool) -> Iterator[tuple[str, str]]:
    """What is printed of one in a list: what it is and, where one group is listed, its options and where it is from."""
    yield entry["name"], entry["summary"]
    if with_options:
        names = [one["name"] + ("" if one["default"] is not None else " (required)") for one in entry["options"]]
        yield "", f"{'options: ' + ', '.join(names) if names else 'no options'}; from {entry['from']}"


def _entries(group: str) -> list[dict[str, Any]]:
    if group == "backends":
        return list(_backends())
    return [_choice_data(choice) for choice in choices(_KINDS[group]).values()]


def _about(name: str) -> list[dict[str, Any]]:
    """Everything that has this name."""
    found = [_choice_data(choice) for choice in find(name)]
    found += [entry for entry in _backends() if entry["name"] == name]
    if not found:
        names = [*_GROUPS, *(choice for kind in _KINDS.values() for choice in choices(kind)), *_backend_names()]
        near = get_close_matches(name, names, n=3)
        hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"there are {', '.join(dict.fromkeys(names))}"
        raise CommandError(f"there is no {name!r}; {hint}")
    return found


def _choice_data(choice: Choice) -> dict[str, Any]:
    needs = choice.only_in_python
    return {
        "name": choice.name,
        "kind": choice.kind,
        "summary": choice.summary + (f" (in Python only: {needs.name} is {needs.in_python})" if needs else ""),
        "from": choice.origin,
        "python_only": needs is not None,
        "about": choice.cls.__doc__ or "",
        "options": [
            {
                "name": option.name,
                "takes": str(option.accepts) if option.accepts.anything else f"{option.in_python}, in Python only",
                "default": None if option.is_required else option.default,
            }
            for option in choice.options
        ],
    }


def _backend_names() -> Sequence[str]:
    from partita.backends import backend_names

    return backend_names()


def _backends() -> Iterator[dict[str, Any]]:
    """The backends by name; one that cannot be loaded has the reason in its place."""
    from partita.backends import find_backend
    from partita.errors import OptionError

    origins = {entry.name: entry for entry in entry_points(group="partita.backends")}
    for name in _backend_names():
        entry = origins.get(name)
        package = "partita" if entry is None or entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        data: dict[str, Any] = {"name": name, "kind": "backend", "from": package, "python_only": False, "options": []}
        try:
            backend = find_backend(name)
        except OptionError as error:
            yield {**data, "summary": f"not usable: {error}", "about": str(error)}
            continue
        about = type(backend).__doc__ or ""
        own: tuple[Field[Any], ...] = fields(backend) if is_dataclass(backend) else ()
        data["options"] = [
            {"name": each.name, "takes": str(each.type), "default": str(getattr(backend, each.name))} for each in own
        ]
        yield {**data, "summary": about.strip().partition("\n")[0], "about": about}


def _print_one(entry: dict[str, Any]) -> None:
    title(f"{entry['kind']} {entry['name']} ({entry['from']})")
    paragraphs = [" ".join(paragraph.split()) for paragraph in entry["about"].strip().split("\n\n")]
    width = min(get_terminal_size().columns, 100) if sys.stdout.isatty() else 100
    say("\n\n".join(fill(one, width, initial_indent="  ", subsequent_indent="  ") for one in paragraphs))
    if entry["options"]:
        options = entry["options"]
        rows = [
            (one["name"], "required" if one["default"] is None else one["default"], one["takes"]) for one in options
        ]
        say()
        table(rows, ("option", "default", "takes"), indent="  ")
    if entry["kind"] in ("policy", "treatment") and not entry["python_only"]:
        say(f"\n  --{entry['kind']} {_example(entry)}")


def _example(entry: dict[str, Any]) -> str:
    """How it is written, with the options that it needs."""
    name, options = entry["name"], entry["options"]
    needed = [f"{one['name']}=..." for one in options if one["default"] is None]
    return f"{name}:{','.join(needed or [options[0]['name'] + '=...'])}" if options else name
