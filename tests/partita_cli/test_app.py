"""The command line starts without torch, says what is wrong in one line, and tells answers by its status."""

from __future__ import annotations

import gc
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.processes import run_in_new_process
from tests.partita_cli.helpers import refused, run

import partita
from partita_cli import app
from partita_cli.commands import inspect

_WITHOUT_TORCH = """
import sys
from partita_cli import main
status = main({words!r})
print(status, *sorted({{"torch", "partita"}} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["plan", "--help"], ["nothing"], ["inspect", "--nothing"]]
)
def test_help_the_version_and_wrong_words_need_no_torch(words: list[str]) -> None:
    code = _WITHOUT_TORCH.format(words=words)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines()[-1] == ("2" if words[-1].endswith("nothing") else "0")


def test_the_library_imports_nothing_that_the_command_line_is_made_of() -> None:
    code = "import sys, partita, partita.testing; print(*{'typer', 'rich', 'partita_cli'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").out == f"partita {partita.__version__}\n"


def test_help_lists_every_command_and_each_has_examples() -> None:
    shown = run("--help").out
    names = [app._NAMES.get(name, name.replace("_", "-")) for name in app._COMMANDS]
    for name in names:
        assert f" {name} " in shown
        told = run(name, "--help")
        assert told.status == 0
        assert f"partita {name}" in told.out.partition("Examples")[2]
        assert "[bold]" not in told.out


@pytest.mark.parametrize("module", ["partita", "partita_cli"])
def test_the_packages_run_as_programs(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["partita", "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module(module, run_name="__main__")
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("partita ")


def test_without_a_command_the_help_is_shown() -> None:
    for words in ((), ("plan",)):
        ran = run(*words)
        assert ran.status == 2
        assert "Usage: partita" in ran.out
        assert ran.err == ""


def test_unknown_commands_and_options_suggest_the_nearest(small_file: Path) -> None:
    assert "Did you mean 'inspect'" in refused("inspct", small_file)
    assert "--policy" in refused("plan", small_file, "--polcy", "size:parts=2")
    assert refused("plan", small_file, "--nothing").endswith("See partita plan --help")


def test_an_error_that_nobody_expected_is_one_line_too_and_debug_shows_the_traceback(
    small_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("for a test\nand a second line")

    monkeypatch.setattr(inspect, "facts_of", broken)
    assert refused("inspect", small_file).startswith("ZeroDivisionError: for a test (--debug")
    for words in (("--debug", "inspect", small_file), ("inspect", small_file, "--debug")):
        ran = run(*words)
        assert ran.status == 2
        assert "Traceback" in ran.err
        assert "in broken" in ran.err


def test_garbage_is_collected_rarely_while_a_command_runs_and_as_before_afterwards(
    small_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def interrupted(*_: object) -> None:
        seen.append(gc.get_threshold()[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "facts_of", interrupted)
    before = gc.get_threshold()
    run("inspect", small_file)
    assert seen[0] >= 50_000
    assert gc.get_threshold() == before


def test_an_interrupt_is_told_by_the_status(small_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "facts_of", interrupted)
    ran = run("inspect", small_file)
    assert (ran.status, ran.err) == (130, "partita: interrupted\n")


def test_a_reader_that_has_seen_enough_is_no_error(small_file: Path) -> None:
    command = f"{sys.executable} -m partita_cli inspect {small_file} --json | head -c 1; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["{0"]
    assert ran.stderr == ""


@pytest.mark.parametrize("words", ["--help", "plan --help", "--version", "list"])
def test_help_and_titles_that_nobody_reads_are_no_error(words: str) -> None:
    command = f"{sys.executable} -m partita_cli {words} | true; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("0\n", "")


def test_the_answer_is_no_whoever_stopped_reading_it(small_file: Path, tmp_path: Path) -> None:
    for name, policy in (("one.json", "size:parts=1"), ("two.json", "size:parts=2")):
        assert run("plan", small_file, "-p", policy, "-o", tmp_path / name).status == 0
    files = f"{tmp_path / 'one.json'} {tmp_path / 'two.json'} --program {small_file}"
    command = f"{sys.executable} -m partita_cli diff {files} | true; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("1\n", "")


def test_a_file_of_recomputed_regions_is_read_in_a_new_process(counting_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt2"
    assert run("apply", counting_file, "-p", "module:blocks.*", "-t", "recompute", "-o", out).status == 0
    source = "import sys; from partita_cli import main; sys.exit(main(['inspect', sys.argv[1], '--json']))"
    ran = run_in_new_process(source, out, environment={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert ran.returncode == 0, ran.stderr
    assert '"partita_wrap_activation_checkpoint": 4' in ran.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("partita ver", ["verify"]),
        ("partita plan model.pt2 --policy ca", ["capability"]),
        ("partita plan model.pt2 -t re", ["recompute"]),
        ("partita list around", ["around-operators"]),
    ],
)
def test_a_shell_completes_commands_and_names_without_torch(words: str, found: list[str]) -> None:
    asked = {"_PARTITA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
    command = [sys.executable, "-c", f"{code}; from partita_cli import main; main()"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **asked})
    assert ran.stdout.split() == found
    assert ran.stderr.split()[-1] == "False"


@pytest.mark.parametrize("command", ["plan", "capture", "verify", "fit", "bisect", "report"])
def test_switches_do_not_look_as_if_they_took_a_value(command: str) -> None:
    lines = [line for line in run(command, "--help").out.splitlines() if "<bool>" in line]
    assert all("--help" in line for line in lines), lines
