"""Arguments and options that several commands have, with their help.

Switches have an empty `metavar`, since typer 0.29 shows `<bool>` beside them, which they do not take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

#: What can be named without code; tests compare these with the classes, which only torch could give here.
POLICIES = ("annotation", "around-operators", "capability", "mode", "module", "repeats", "size")
TREATMENTS = ("call", "delegate", "leave-eager", "lower", "mark", "mode", "recompute")


def examples(*lines: str) -> str:
    """The examples of a command, for the end of its help."""
    return "\n\n".join(["[bold]Examples[/bold]", *(line.replace("[", "\\[") for line in lines)])


def _completed(names: tuple[str, ...], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _policies(incomplete: str) -> list[str]:
    return _completed(POLICIES, incomplete)


def _treatments(incomplete: str) -> list[str]:
    regions, sign, name = incomplete.rpartition("=") if ":" not in incomplete else ("", "", incomplete)
    return [f"{regions}{sign}{found}" for found in _completed(TREATMENTS, name)]


ProgramPath: TypeAlias = Annotated[
    Path, typer.Argument(metavar="MODEL.pt2", help="An exported program; it is read as data, nothing in it is run.")
]
PolicyText: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--policy",
        "-p",
        metavar="NAME[:OPTIONS]",
        help="What decides the regions: size:parts=4, module:layers.*, capability:inductor; see partita list policies.",
        autocompletion=_policies,
    ),
]
TreatmentTexts: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--treatment",
        "-t",
        metavar="[REGIONS=]NAME[:OPTIONS]",
        help="What is done to each region: lower:inductor, recompute, call (the default); see partita list treatments. "
        "With REGIONS=, what is done to these, by name or label, where * and ? stand for any text and any character: "
        "'blocks.*=recompute'. Repeatable: of several that fit a region, the last counts.",
        autocompletion=_treatments,
    ),
]
PlanPath: TypeAlias = Annotated[
    Path | None,
    typer.Option("--plan", metavar="PLAN.json", help="A plan that partita plan -o has written, for this program."),
]
InputsPath: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        metavar="FILE.pt",
        help="Arguments, saved with torch.save and read as data: a tuple of them, or (arguments, keyword arguments).",
    ),
]
Seed: TypeAlias = Annotated[
    int, typer.Option("--seed", help="For the random inputs that are made where --inputs is missing.")
]
Gradients: TypeAlias = Annotated[bool, typer.Option(help="Compare gradients too.", metavar="")]
Relative: TypeAlias = Annotated[
    float | None, typer.Option(help="How far numbers may differ; the same bits, or what a treatment declares.")
]
Absolute: TypeAlias = Annotated[float | None, typer.Option(help="The same, as an absolute distance.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.", metavar="")]
Trusted: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--trusted",
        help="Let torch load the file instead, which can run any code that is in it. Only for files you made.",
        metavar="",
    ),
]
Operators: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--operators",
        metavar="NAMESPACE",
        help="A namespace of operators, or one namespace::name, that the file may name beside torch's; repeatable.",
    ),
]
Imports: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="MODULE", help="A module to import first: it registers operators, say; repeatable."
    ),
]
FunctionPath: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function without arguments that returns a model and its inputs: (model, args) or (model, (args, "
        "kwargs)). MODULE is found from the current folder too, and may be a file: model.py:build.",
    ),
]
