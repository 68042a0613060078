"""`partita fit`: the fastest training step whose memory peak fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partita_cli.errors import CommandError
from partita_cli.options import AsJson, FunctionPath, examples
from partita_cli.output import (
    check_output,
    complain,
    held_back,
    one_line,
    remark,
    say,
    say_json,
    table,
    whole_file,
    working,
)
from partita_cli.sources import ModelCall, read_model

if TYPE_CHECKING:
    from partita.memory import MemoryPlan, StepMemory

NEEDS_ARGUMENTS = True
EPILOG = examples(
    "partita fit model.py:build --peak 11GB",
    "partita fit model.py:build --peak 0.6 --optimizer AdamW --picture step.svg",
    "partita fit model.py:build --curve",
)


def command(
    function: FunctionPath,
    peak: Annotated[
        str | None,
        typer.Option("--peak", help="The most bytes a step may take: 11GB, 900MiB, or a part of the plain step: 0.6."),
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Show peaks against the time that recomputation adds.", metavar="")
    ] = False,
    points: Annotated[int, typer.Option("--points", min=2, help="How many points the curve has.")] = 8,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="STEP.svg", help="Write the bytes over the step: .svg, .png, .txt or .json."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="STEP.html", help="Write the plan as a page, .json, .dot or .trace.json."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT.pt2", help="Write the program that runs so.")
    ] = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="Its state counts: the name of one in torch.optim, or bytes.")
    ] = "0",
    communication: Annotated[str, typer.Option("--communication", help="Bytes that communication takes, 200MB.")] = "0",
    chart: Annotated[
        bool, typer.Option("--chart", help="Draw the bytes over the step in the terminal.", metavar="")
    ] = False,
    json: AsJson = False,
) -> int:
    """Plan a training step that takes at most so many bytes: which blocks are recomputed, and the predicted peak.

    The model returns its loss. Nothing is run but on fake tensors. The status is 1 if no plan fits.
    """
    if peak is None and not curve:
        raise CommandError("give --peak, for example --peak 11GB, or --curve")
    if peak is None and (picture or report or output or chart):
        raise CommandError("--picture, --report, --output and --chart show one plan: give --peak, too")
    _check_outputs(picture, report, output)
    step = _step(read_model(function), optimizer, communication)
    with working("planning"):
        plans = step.curve(points) if curve else ()
    found = None if peak is None else _planned(step, peak)
    if json:
        say_json({"plan": None if found is None else _data(found), "curve": [_point(one) for one in plans]})
    else:
        _show(found, plans, chart=chart)
    if found is None:
        return 0 if peak is None else 1
    _write(found, picture=picture, report=report, output=output)
    return 0


def _check_outputs(picture: Path | None, report: Path | None, output: Path | None) -> None:
    check_output(picture, ".svg", ".png", ".txt", ".json")
    check_output(report, ".html", ".json", ".dot")
    check_output(output, ".pt2")


def _write(plan: MemoryPlan, *, picture: Path | None, report: Path | None, output: Path | None) -> None:
    """Writes what was asked for."""
    import partita

    if picture is not None:
        with whole_file(picture) as draft:
            plan.picture().save(draft)
    if report is not None:
        with working(f"writing {report}"):
            partita.report(plan.plan, memory=plan).save(report)
    if output is not None:
        with working(f"writing {output}"), whole_file(output) as draft:
            plan.program.save(draft)
    for path in filter(None, (picture, report, output)):
        remark(f"written: {path}")


def _step(call: ModelCall, optimizer: str, communication: str) -> StepMemory:
    from torch import nn

    from partita.memory import step_memory

    if not isinstance(call.model, nn.Module):
        raise CommandError("a training step is that of a torch.nn.Module, and the function returns another callable")
    with working("running the step on fake tensors"), held_back():
        state = _optimizer(call.model, optimizer)
        sent: Any = int(communication) if communication.isdigit() else communication
        return step_memory(call.model, call.args, call.kwargs, optimizer=state, communication=sent)


def _optimizer(model: Any, text: str) -> Any:
    """The optimizer of that name over the parameters of the model, or its bytes."""
    import torch

    from partita.memory.budget import bytes_said

    if not text[:1].isalpha():
        return bytes_said(text, "optimizer")
    made = getattr(torch.optim, text, None)
    if not isinstance(made, type) or not issubclass(made, torch.optim.Optimizer):
        raise CommandError(f"torch.optim has no optimizer {text!r}; write AdamW, SGD or the bytes of its state, 2GB")
    return made(model.parameters(), lr=1e-3)  # type: ignore[call-arg]


def _planned(step: StepMemory, peak: str) -> MemoryPlan | None:
    """The plan; None where no plan fits, which is said."""
    from partita.errors import BudgetError

    try:
        with working("planning"):
            return step.plan(_budget(peak))
    except BudgetError as error:
        if error.smallest is None:
            raise
        complain(one_line(str(error)))
        return None


def _budget(peak: str) -> str | float:
    """A part of the plain peak is a number up to 1."""
    try:
        number = float(peak)
    except ValueError:
        return peak
    return number if 0 < number <= 1 else peak


def _show(plan: MemoryPlan | None, curve: Sequence[MemoryPlan], *, chart: bool) -> None:
    from partita.memory.budget import shown_bytes
    from partita.memory.rates import shown_milliseconds, two_digits

    rows = [
        (
            shown_bytes(one.peak_bytes),
            f"{100 * one.peak_bytes / one.plain_peak_bytes:.0f} %",
            shown_milliseconds(one.extra_seconds),
            f"{two_digits(100 * one.extra_seconds / one.plain_seconds if one.plain_seconds else 0)} %",
        )
        for one in curve
    ]
    if rows:
        table(rows, ("peak", "of plain", "adds", "to the step"))
    if rows and plan is not None:
        say()
    if plan is not None:
        say(str(plan))
    if plan is not None and chart:
        say(f"\n{plan.picture()}")


def _point(plan: MemoryPlan) -> dict[str, Any]:
    """A point of the curve."""
    return {key: value for key, value in _data(plan).items() if key != "segments"}


def _data(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "extra_seconds": plan.extra_seconds,
        "plain_seconds": plan.plain_seconds,
        "segments": [
            {"name": one.name, "recomputed": one.is_recomputed, "kept": list(one.kept), "held_bytes": one.held_bytes}
            for one in plan.segments
        ],
    }
