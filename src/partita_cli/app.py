"""The commands, and what they share: the version, one line for an error, the exit status."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from partita_cli.errors import CommandError
from partita_cli.output import complain, flush, one_line

#: The modules of the commands, in the order of a first acquaintance; each has `command`, and `EPILOG` with examples.
_COMMANDS = (
    "demo",
    "capture",
    "inspect",
    "plan",
    "apply",
    "verify",
    "bisect",
    "explain",
    "diff",
    "report",
    "fit",
    "check_backend",
    "list_all",
    "doctor",
)
_NAMES = {"list_all": "list"}

BAD_INPUT, INTERRUPTED = 2, 130
#: How many objects a command makes before Python looks for cyclic garbage among them; Python itself has 700.
_OBJECTS_BETWEEN_COLLECTIONS = 50_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its status: 0 fine, 1 the answer is no, 2 the input is wrong, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # It may be written before the command or after it.
    shows_traceback = "--debug" in given
    given = [word for word in given if word != "--debug"]
    try:
        with _rare_collections():
            status = application()(given, prog_name="partita", standalone_mode=False)
        if status == INTERRUPTED:
            complain("interrupted")
        flush()
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        return INTERRUPTED
    except SystemExit as left:
        # Typer leaves so when the reader of its help has closed the pipe.
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        flush()
        return 0
    except Exception as error:
        if shows_traceback:
            traceback.print_exc()
        elif message := _message_of(error):
            complain(message)
        return BAD_INPUT


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Fewer cyclic collections: what torch's modules and a graph are made of stays, and each would visit it again."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _OBJECTS_BETWEEN_COLLECTIONS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@cache
def application() -> typer.Typer:
    """The command line with all commands; nothing of this imports torch."""
    made = typer.Typer(
        name="partita",
        help="Cuts a PyTorch graph into regions, changes how each region runs, and checks that the program still means "
        "the same.",
        epilog="Exit status: 0 fine; 1 the answer is no (it differs, it does not hold, it does not fit); 2 bad input."
        "\n\nStart with: partita demo",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_options)
    for module_name in _COMMANDS:
        package = "partita_cli" if module_name == "demo" else "partita_cli.commands"
        module = import_module(f"{package}.{module_name}")
        name = _NAMES.get(module_name, module_name.replace("_", "-"))
        made.command(name, epilog=module.EPILOG, no_args_is_help=getattr(module, "NEEDS_ARGUMENTS", False))(
            module.command
        )
    return made


def _show(wanted: bool) -> None:  # noqa: FBT001  Typer passes it so.
    if wanted:
        typer.echo(f"partita {version()}")
        raise typer.Exit()


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show, metavar=""),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", metavar="")] = False,
) -> None:
    """Reads the options that stand before a command; `--debug` was taken out by `main`."""


def version() -> str:
    """The version of Partita, read from its source: importing it would import torch."""
    spec = find_spec("partita")
    source = getattr(spec.loader, "get_source", lambda _: "")("partita") if spec is not None else ""
    for line in (source or "").splitlines():
        if line.startswith("__version__"):
            return line.partition("=")[2].strip(" \"'")
    raise CommandError("the package partita is not installed, only its command line")


def _message_of(error: Exception) -> str:
    """An error in one line; empty where all is said."""
    format_message = getattr(error, "format_message", None)  # Of typer: a wrong option, a missing argument.
    if format_message is not None:
        context = getattr(error, "ctx", None)
        path = getattr(context, "command_path", "partita")
        # Without any argument help was shown, and there is nothing more to say.
        message = one_line(format_message() or "").rstrip(".") if format_message() else ""
        return f"{message}. See {path} --help" if message else ""
    errors = sys.modules.get("partita.errors")
    if isinstance(error, CommandError) or (errors is not None and isinstance(error, errors.PartitaError)):
        return one_line(str(error))
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "torch is not installed: pip install torch; partita doctor says what else is missing"
    return f"{type(error).__name__}: {one_line(str(error))} (--debug shows where)"
