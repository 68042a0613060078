"""Plans as data: JSON that names regions, nodes and treatments, and is tied to its program by a digest of its graph.

Nothing in a file is imported or run. Classes are found among those that the caller knows, by name, and built from plain
values; every value is checked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_args

from torch.fx import Node

from partita.errors import ArchiveError, PartitaError, PlanFileError
from partita.plans.plan import Plan
from partita.plans.treatment import Treatment, is_treatment
from partita.program.archives.container import brief, open_file, shown
from partita.program.fingerprint import program_digest
from partita.program.program import Program
from partita.regions import Partition, Region
from partita.regions.region import Reason, ReasonKind
from partita.rewrite.inline import inline_modes
from partita.rewrite.wrap_modes import wrap_modes
from partita.whole_files import whole_file

FORMAT, VERSION = "partita plan", 1

#: Classes whose instances a plan may hold, by the name under which a file has them.
Known = Mapping[str, type]


def as_data(plan: Plan, known: Known) -> dict[str, Any]:
    """The plan as values that JSON has."""
    writer = _Writer(known)
    numbers: dict[int, int] = {}
    treatments: list[Any] = []
    for treatment in plan.treatments:
        if id(treatment) not in numbers:
            numbers[id(treatment)] = len(treatments)
            treatments.append(writer.value(treatment, f"treatment {treatment!r}"))
    regions = [
        {
            "name": region.name,
            "label": writer.value(region.label, f"the label of region {region.name!r}"),
            "nodes": [node.name for node in region.nodes],
            "treatment": numbers[id(treatment)],
        }
        for region, treatment in zip(plan.partition, plan.treatments, strict=True)
    ]
    by_reason: dict[tuple[str, str, str, str], list[str]] = {}
    for node, text in plan.partition.reasons.items():
        reason = Reason.of(text)
        by_reason.setdefault((str(reason), reason.kind, reason.by, reason.why), []).append(node.name)
    constants = [node.name for node in plan.partition.constant_nodes()]
    return {
        "format": FORMAT,
        "version": VERSION,
        "program": program_digest(plan.program),
        "restores_modes": plan.puts_back_modes,
        "treatments": treatments,
        "regions": regions,
        **({"numbers": constants} if constants else {}),
        "reasons": [
            {"text": _printable(text), "kind": kind, "by": _printable(by), "why": _printable(why), "nodes": nodes}
            for (text, kind, by, why), nodes in by_reason.items()
        ],
    }


def _printable(text: str) -> str:
    """The text of a backend or a policy, which may hold anything; a file with what cannot be printed is refused."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def write_plan(plan: Plan, path: str | os.PathLike[str], known: Known) -> None:
    """Writes a plan; a file that is there is replaced when the new one is complete."""
    text = json.dumps(as_data(plan, known), indent=1)
    with whole_file(path) as draft:
        draft.write_text(text, encoding="utf-8")


def read_plan(path: str | os.PathLike[str], program: Program, known: Known) -> Plan:
    """The plan of a file for this program; a `PlanFileError` if it is damaged, or of another program.

    A captured program has toggles around its mode blocks, and an operator for each of them once it was saved. Where the
    plan was made for the other form, the program of the plan is this one in that form.
    """
    return from_data(_parsed(Path(path)), program, known, where=shown(str(path)))


def _parsed(path: Path) -> Any:
    where = shown(str(path))
    try:
        with open_file(path) as file:
            data = file.read(_MOST_BYTES + 1)
    except ArchiveError as error:
        raise PlanFileError(f"{where} is no file; a plan is written by partita.save_plan") from error
    if len(data) > _MOST_BYTES:
        raise PlanFileError(f"{where} has more than {_MOST_BYTES:,} bytes, which no plan has")
    if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise PlanFileError(f"{where} has more than {_MOST_VALUES:,} values, which no plan has")
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{where} is no plan: it is not JSON ({type(error).__name__}: {error})") from None


#: A million nodes take about 20 MB; a value takes up to a hundred bytes of memory, and as few as three in the file.
_MOST_BYTES, _MOST_VALUES = 1 << 28, 10_000_000


def from_data(data: Any, program: Program, known: Known, *, where: str = "the plan") -> Plan:
    """The plan that `as_data` has written, for this program."""
    reader = _Reader(known, where)
    passes_numbers = isinstance(data, dict) and "numbers" in data
    found = reader.record(data, {**_PLAN, "numbers": list} if passes_numbers else _PLAN, where)
    if found["format"] != FORMAT or found["version"] != VERSION:
        raise PlanFileError(
            f"{where} has the format {found['format'][:40]!r}, version {str(found['version'])[:40]}; this version of "
            f"Partita reads {FORMAT!r}, version {VERSION}"
        )
    planned = _form_with_digest(found["program"], program)
    if planned is None:
        raise PlanFileError(
            f"{where} is a plan for another program. A plan fits the program that it was made for, or the same model "
            "captured again, before or after it was saved; make a new one for this program"
        )
    if len(found["treatments"]) > len(found["regions"]):
        raise PlanFileError(f"{where} has more treatments than regions, which no plan has")
    treatments = [reader.value(one, f"treatment {at}") for at, one in enumerate(found["treatments"])]
    for at, one in enumerate(treatments):
        if not is_treatment(one):
            raise PlanFileError(f"{where}: treatment {at} is {brief(one)}, which is no treatment")
    try:
        return _assembled(found, treatments, planned, reader)
    except PlanFileError:
        raise
    except PartitaError as error:
        raise PlanFileError(f"{where} is no plan of this program: {error}") from None


def _form_with_digest(digest: str, program: Program) -> Program | None:
    """The program with its mode blocks as they are, as toggles or as operators: whichever has this digest."""
    for form in (_as_it_is, inline_modes, wrap_modes, _wrapped_anew):
        try:
            found = program.once(form)
        except PartitaError:  # It has no such form, and so no plan was made for that.
            continue
        if program_digest(found) == digest:
            return found
    return None


def _as_it_is(program: Program) -> Program:
    return program


def _wrapped_anew(program: Program) -> Program:
    """With the names that our operators have: torch's loader gives them others."""
    return wrap_modes(program.once(inline_modes))


def _assembled(found: dict[str, Any], treatments: Sequence[Any], program: Program, reader: _Reader) -> Plan:
    where = reader.where
    regions, chosen = [], list[Treatment]()
    letters, longest = [len(str(one)) for one in found["treatments"]], 0
    for at, one in enumerate(found["regions"]):
        row = reader.record(one, _REGION, f"region {at}")
        if not 0 <= row["treatment"] < len(treatments):
            raise PlanFileError(f"{where}: region {row['name']!r} has treatment {row['treatment']}, and there is none")
        nodes = reader.nodes(row["nodes"], program, f"region {row['name']!r}")
        label = reader.hashable(row["label"], f"the label of region {row['name']!r}")
        longest = max(longest, len(row["name"]) + len(str(row["label"])) + letters[row["treatment"]])
        regions.append(Region(row["name"], nodes, label))
        chosen.append(treatments[row["treatment"]])
    if longest * len(regions) > _MOST_LETTERS:
        raise PlanFileError(
            f"{where}: a region has a name, a label and a treatment of {longest} letters, too long to be "
            f"printed for each of {len(regions)} regions"
        )
    reasons: dict[Node, str] = {}
    for at, one in enumerate(found["reasons"]):
        row = reader.record(one, _REASON, f"reason {at}")
        if row["kind"] not in get_args(ReasonKind):
            raise PlanFileError(f"{where}: reason {at} is of the kind {row['kind'][:40]!r}, which no reason has")
        reason = Reason(row["text"], kind=row["kind"], by=row["by"], why=row["why"])
        reasons.update(dict.fromkeys(reader.nodes(row["nodes"], program, f"reason {at}"), reason))
    partition = Partition(program, regions, reasons)
    if "numbers" in found:
        partition = partition.passing_numbers(reader.nodes(found["numbers"], program, "the list of numbers"))
    return Plan(partition, tuple(chosen), found["restores_modes"])


_PLAN = {
    "format": str, "version": int, "program": str, "restores_modes": bool, "treatments": list, "regions": list,
    "reasons": list,
}  # fmt: skip
_REGION = {"name": str, "label": object, "nodes": list, "treatment": int}
_REASON = {"text": str, "kind": str, "by": str, "why": str, "nodes": list}
_PLAIN = (type(None), bool, int, float, str)


class _Writer:
    """Writes values of options: plain ones, containers, and instances of known classes."""

    def __init__(self, known: Known) -> None:
        self._names = {cls: name for name, cls in known.items()}

    def value(self, value: object, where: str, depth: int = 0) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if depth == _DEEPEST:
            raise PlanFileError(f"{where} holds containers that are nested more than {_DEEPEST} deep")
        if kind in (list, tuple):
            return {kind.__name__: [self.value(one, where, depth + 1) for one in value]}  # type: ignore[attr-defined]
        if isinstance(value, set | frozenset):
            return {"set": sorted((self.value(one, where, depth + 1) for one in value), key=repr)}
        name = self._names.get(kind)
        if name is None or not is_dataclass(value):
            raise PlanFileError(
                f"{where} holds {value!r}, which a file cannot hold: it takes numbers, texts, lists, tuples and sets "
                f"of these, and options of the classes {', '.join(sorted(self._names.values()))}"
            )
        return {"class": name, "options": self._options(value, where, depth)}

    def _options(self, value: Any, where: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in fields(value):
            held = getattr(value, one.name)
            if one.name.startswith("_"):
                continue
            if one.name in unsaved_options(type(value)):
                if one.default is not MISSING and held == one.default:
                    continue
                raise PlanFileError(
                    f"{where}: a file does not hold the option {one.name!r}, which decides what code is run; save the "
                    "plan without it, and set it after loading"
                )
            found[one.name] = self.value(held, where, depth + 1)
        return found


def unsaved_options(cls: type) -> frozenset[str]:
    """The options of a class that decide which code runs; a file has none of them."""
    return frozenset(getattr(cls, "unsaved_options", ()))


class _Reader:
    """Reads what a `_Writer` wrote, and refuses everything else."""

    def __init__(self, known: Known, where: str) -> None:
        self._known, self.where = known, where

    def record(self, data: Any, expected: Mapping[str, type], what: str) -> dict[str, Any]:
        if not isinstance(data, dict) or set(data) != set(expected):
            keys = ", ".join(map(repr, expected))
            raise PlanFileError(f"{self.where}: {what} is not an object with the keys {keys}")
        for key, kind in expected.items():
            if not isinstance(data[key], kind) or (kind is int and isinstance(data[key], bool)):
                raise PlanFileError(f"{self.where}: {key!r} of {what} is not of the type {kind.__name__}")
            self._check(data[key], what)
        return data

    def _check(self, value: object, what: str) -> None:
        """Raises for numbers and texts that no plan needs, and that harm where they are compared or printed."""
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:  # Of larger ones, any number have one hash.
            raise PlanFileError(f"{self.where}: {what} has a number beyond 64 bits")
        if isinstance(value, str) and _UNPRINTABLE.search(value):
            raise PlanFileError(f"{self.where}: {what} has a text that cannot be printed: {ascii(value)[:80]}")

    def nodes(self, names: Sequence[Any], program: Program, what: str) -> tuple[Node, ...]:
        for name in names:
            if not isinstance(name, str):
                raise PlanFileError(f"{self.where}: {what} has {brief(name)} among its nodes, which is no name")
        try:
            return tuple(program.node(name) for name in names)
        except PartitaError as error:
            raise PlanFileError(
                f"{self.where}: {what} has a node that this program has not: {str(error)[:300]}"
            ) from None

    def hashable(self, data: Any, what: str, depth: int = 0) -> Hashable:
        found = self.value(data, what, depth)
        try:
            hash(found)
        except TypeError:
            raise PlanFileError(f"{self.where}: {what} has a list in it, which no label and no set has") from None
        return found  # type: ignore[no-any-return]

    def value(self, data: Any, what: str, depth: int = 0) -> Any:
        if isinstance(data, _PLAIN):
            self._check(data, what)
            return data
        if isinstance(data, dict) and depth < _DEEPEST:
            match data:
                case {"list": list(items)} if len(data) == 1:
                    return [self.value(one, what, depth + 1) for one in items]
                case {"tuple": list(items)} if len(data) == 1:
                    return tuple(self.value(one, what, depth + 1) for one in items)
                case {"set": list(items)} if len(data) == 1:
                    # The hashes of texts are random, but of tuples of numbers a file can have any number with one hash.
                    if len(items) > _MOST_IN_SET and not all(isinstance(one, str) for one in items):
                        raise PlanFileError(
                            f"{self.where}: {what} has a set of more than {_MOST_IN_SET} values that are no texts"
                        )
                    return frozenset(self.hashable(one, what, depth + 1) for one in items)
                case {"class": str(name), "options": dict(options)} if len(data) == 2:
                    return self._instance(name, options, what, depth)
        raise PlanFileError(f"{self.where}: {what} has a value that no plan has: {brief(data)}")

    def _instance(self, name: str, options: dict[str, Any], what: str, depth: int) -> Any:
        cls = self._known.get(name)
        if cls is None:
            raise PlanFileError(
                f"{self.where}: {what} is of the class {brief(name)}, which is not known; there are "
                f"{', '.join(sorted(self._known))}, and those that you pass as `classes`"
            )
        taken = {one.name for one in fields(cls) if not one.name.startswith("_")} - unsaved_options(cls)
        unknown = sorted(set(options) - taken)
        if unknown:
            raise PlanFileError(
                f"{self.where}: {what} of the class {name!r} has no option {brief(unknown[0])} in a file"
            )
        values = {key: self.value(one, what, depth + 1) for key, one in options.items()}
        positional = [
            parameter.name
            for parameter in signature(cls).parameters.values()
            if parameter.kind is Parameter.VAR_POSITIONAL
        ]
        rest: Iterable[Any] = values.pop(positional[0], ()) if positional else ()
        try:
            return cls(*rest, **values)
        except (PartitaError, TypeError, ValueError) as error:
            raise PlanFileError(f"{self.where}: {what}: {name} does not take these options: {error}") from None


_DEEPEST = 20
_MOST_IN_SET = 100
#: How many letters a table of all regions has: each row is as long as the longest, and a file may have one long
#: treatment to which thousands of regions refer.
_MOST_LETTERS = 50_000_000
#: Signs that a terminal interprets or that reverse the direction of a text, and halves of characters; no line breaks.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
