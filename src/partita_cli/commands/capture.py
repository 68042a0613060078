"""`partita capture`: a model into a .pt2 file, with every mode block kept."""

from __future__ import annotations

import inspect as signatures
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from partita_cli.errors import CommandError
from partita_cli.options import AsJson, FunctionPath, examples
from partita_cli.output import check_output, counted, held_back, say, say_json, whole_file, working
from partita_cli.sources import ModelCall, read_model

if TYPE_CHECKING:
    from partita import Program

NEEDS_ARGUMENTS = True
EPILOG = examples(
    "partita capture mymodels.decoder:build -o decoder.pt2",
    "partita capture model.py:build -o model.pt2 --dynamic x:0=batch",
    "partita capture model.py:build -o m.pt2 --dynamic ids:1=tokens:2..512",
    "partita capture model.py:build -o model.pt2 --dynamic auto",
)
_SIZE = re.compile(r"(?P<axis>\d+)(=(?P<name>[A-Za-z]\w*)(:(?P<least>\d*)\.\.(?P<most>\d*))?)?")


def command(
    function: FunctionPath,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="MODEL.pt2", help="The file to write.")],
    dynamic: Annotated[
        list[str] | None,
        typer.Option(
            "--dynamic",
            metavar="INPUT:AXIS=NAME",
            help="A size that may change, as in x:0=batch or x:0=batch:2..64; sizes of one name are equal, and "
            "several axes are separated by commas. x:0 lets torch find out, as does x for all sizes of x; auto is "
            "all sizes of all inputs. Repeatable.",
        ),
    ] = None,
    train: Annotated[
        bool | None,
        typer.Option("--train/--eval", help="Switch the model to training or evaluation mode first.", metavar=""),
    ] = None,
    json: AsJson = False,
) -> None:
    """Capture a model in a .pt2 file: torch.export, with every no_grad and autocast block kept."""
    check_output(output, ".pt2")
    call = read_model(function)
    with working("capturing"), held_back():
        import partita

        if train is not None and hasattr(call.model, "train"):
            call.model.train(train)
        sizes = dynamic_shapes(call, dynamic or ())
        program = partita.capture(call.model, call.args, call.kwargs or None, dynamic_shapes=sizes)
    with working(f"writing {output}"), whole_file(output) as draft:
        program.save(draft)
    needed = needed_imports(program)
    if json:
        facts = {"file": str(output), "nodes": len(program.index), "bytes": output.stat().st_size}
        say_json({**facts, "imports": needed})
    else:
        words = "".join(f" --import {name}" for name in needed)
        say(f"{output}: {counted(len(program.index), 'node')}; next: partita inspect {output}{words}")


def needed_imports(program: Program) -> list[str]:
    """The modules of the containers that the model takes and returns, without which the file cannot be read."""
    if program.export is None:
        return []
    signature = next(one.signature for one in program.export.module_calls if not one.fqn)
    found: dict[str, None] = {}
    waiting = [signature.in_spec, signature.out_spec]
    while waiting:
        spec = waiting.pop()
        module = getattr(spec.type, "__module__", "builtins")
        if module.partition(".")[0] not in ("builtins", "collections", "torch"):
            found[module] = None
        waiting += spec.children()
    return list(found)


def dynamic_shapes(call: ModelCall, texts: Sequence[str]) -> Any:
    """The dynamic sizes in the form that torch.export takes."""
    from torch import Tensor
    from torch.export import Dim

    if not texts:
        return None
    inputs = _inputs_by_name(call)
    if "auto" in texts and "auto" not in inputs:
        return {name: _all_sizes(value) for name, value in inputs.items()}
    found: dict[str, dict[int, Any] | None] = dict.fromkeys(inputs)
    names: dict[str, Any] = {}
    for text in texts:
        name, _, sizes = text.partition(":")
        value = inputs.get(name)
        if not isinstance(value, Tensor):
            tensors = [one for one, held in inputs.items() if isinstance(held, Tensor)]
            raise CommandError(f"{text!r} names no tensor; the inputs are {', '.join(tensors) or 'no tensors'}")
        entry = found[name] = found[name] or {}
        for size in sizes.split(",") if sizes else map(str, range(value.dim())):
            match = _SIZE.fullmatch(size)
            if match is None or int(match["axis"]) >= value.dim():
                raise CommandError(
                    f"{size!r} in {text!r} is no size of {name}, which has {value.dim()}; write {name}:0=batch or "
                    f"{name}:0=batch:2..64"
                )
            entry[int(match["axis"])] = _dimension(match, names) if match["name"] else Dim.AUTO
    return found


def _dimension(match: re.Match[str], names: dict[str, Any]) -> Any:
    """The dimension of that name, the same wherever it is named."""
    from torch.export import Dim

    name = match["name"]
    limits = {key: int(match[word]) for key, word in (("min", "least"), ("max", "most")) if match[word]}
    if limits.get("min", 0) > limits.get("max", math.inf):
        raise CommandError(f"{match[0]!r} has a least size above the most; write {match['axis']}={name}:2..64")
    if name not in names:
        names[name] = Dim(name, **limits)
    elif any(getattr(names[name], key) != limit for key, limit in limits.items()):
        raise CommandError(f"the size {name} has other limits in {match[0]!r} than before; write them once")
    return names[name]


def _inputs_by_name(call: ModelCall) -> Mapping[str, Any]:
    """The arguments under the names of the parameters that they are passed for."""
    function: Any = getattr(call.model, "forward", call.model)
    bound = signatures.signature(function).bind(*call.args, **call.kwargs)
    parameters = bound.signature.parameters
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        found.update(value if parameters[name].kind is signatures.Parameter.VAR_KEYWORD else {name: value})
    return found


def _all_sizes(value: Any) -> Any:
    """The same containers with all sizes of tensors dynamic."""
    from torch import Tensor
    from torch.export import Dim

    if isinstance(value, Tensor):
        return dict.fromkeys(range(value.dim()), Dim.AUTO)
    if isinstance(value, dict):
        return {key: _all_sizes(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return (list if isinstance(value, list) else tuple)(map(_all_sizes, value))
    return None
