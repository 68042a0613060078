"""The demo runs, shows every chapter, and tells success from failure."""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import partita
from partita.treatments import Lower
from partita_cli import main
from partita_cli.demo import (
    bisecting,
    fitting,
    lowering,
    modes,
    recomputing,
    reload,
    splitting,
    with_inductor,
)
from partita_cli.demo.modes import seeded


def _demo(*words: str) -> str:
    """What the demo prints when it succeeds."""
    printed = StringIO()
    with redirect_stdout(printed):
        assert main(["demo", *words]) == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What it prints if it does not wait for Inductor, which takes longer than all the rest.

    It runs in a folder with a Python file that hides one of the standard library from a child process that looks there.
    """
    folder = tmp_path_factory.mktemp("with_python_files")
    folder.joinpath("typing.py").write_text("raise ImportError('not the typing of the standard library')")
    popen = subprocess.Popen

    def started(command: list[str], **options: Any) -> subprocess.Popen[str]:
        is_inductor = command[-1] == with_inductor.__name__
        return popen([sys.executable, "-c", "import signal; signal.pause()"] if is_inductor else command, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(lowering, "_TIMEOUT_S", 0.0)
        patch.setattr(subprocess, "Popen", started)
        return _demo()


def test_the_demo_runs_to_the_end(demo: str) -> None:
    assert demo.rstrip().endswith("All of it held.")
    head = next(line for line in demo.splitlines() if line.strip().startswith("region "))
    assert head.split() == [
        "region",
        "nodes",
        "in",
        "out",
        "bytes",
        "in",
        "bytes",
        "out",
        "flops",
        "treatment",
        "label",
    ]
    assert "Call()" in demo
    assert all(f"\n{number}. " in demo for number in range(1, 10))


def test_the_chapter_on_modes_shows_the_tree_and_the_round_trip(demo: str) -> None:
    told = [line.strip() for line in demo.partition("\n3. ")[2].partition("\n4. ")[0].splitlines()]
    assert "+- autocast on cpu float16: 10 operators, linear .. linear_1" in told
    assert "+- no_grad: 2 operators, linear .. relu" in told
    verdicts = {line.split()[0]: line.split()[-1] for line in told if line.endswith(("same", "WRONG"))}
    assert verdicts == {"torch.export": "WRONG", "partita.capture": "same"}
    steps = [line.partition(":")[0] for line in told if line.startswith(("wrapped", "saved", "loaded", "dissolved"))]
    assert steps == ["wrapped", "saved", "loaded", "dissolved"]
    assert sum("nothing differs in 3 calls" in line for line in told) == 2


def test_the_chapter_on_modes_says_that_onnx_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(modes, "find_spec", lambda name: None)
    monkeypatch.setattr(modes, "_show_file", lambda wrapped: True)
    assert modes.show()
    assert "which are not all installed" in capsys.readouterr().out


def test_the_chapter_on_modes_reports_a_file_that_differs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, args = seeded()
    with torch.no_grad():
        model.student.bias.add_(1)
    torch.export.save(partita.capture(model, args).exported(), tmp_path / "other.pt2")
    assert reload.main(str(tmp_path / "other.pt2")) == 1
    assert "difference" in capsys.readouterr().out


def test_the_chapter_on_lowering_gives_the_reasons_and_verifies(demo: str) -> None:
    told = demo.partition("\n4. ")[2].partition("\n5. ")[0]
    assert "refused by small_chip: no kernel for attention: aten.scaled_dot_product_attention.default" in told
    assert "outside every region: refused by small_chip: no kernel for attention" in told
    assert "  cut from what is before by " in told
    assert "lowered with aot_eager, values and gradients compared: nothing differs in 3 calls" in told
    assert "run eagerly: 0" in told
    assert "lowered with inductor: skipped" in told


@pytest.mark.slow
def test_the_demo_compiles_with_inductor(tmp_path: Path) -> None:
    told = _demo("-o", str(tmp_path / "demo.html")).partition("\n4. ")[2].partition("\n5. ")[0]
    # A compiler that is slow, or that nobody has used before, is not waited for.
    assert "compared under no_grad: nothing differs" in told or "lowered with inductor: skipped" in told


@pytest.mark.parametrize("status", [0, 1])
def test_the_chapter_on_lowering_tells_what_the_other_process_finds(
    status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def started(command: list[str], **options: Any) -> subprocess.Popen[str]:
        commands.append(command)
        return popen([sys.executable, "-c", f"print('compiled'); raise SystemExit({status})"], **options)

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(lowering, "_show_capability", lambda: partita.compare(torch.sin, torch.sin, (torch.ones(2),)))
    assert lowering.show() is (status == 0)
    assert capsys.readouterr().out == "lowered with inductor:\ncompiled\n"
    assert commands == [[sys.executable, "-P", "-m", with_inductor.__name__]]


def test_the_chapter_on_lowering_needs_no_other_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lowering, "find_spec", lambda name: None)
    assert lowering._show_capability().equal
    assert capsys.readouterr().out.startswith("a small decoder; ")


def test_the_chapter_on_lowering_waits_for_no_slow_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lowering, "_TIMEOUT_S", 0.0)
    monkeypatch.setattr(lowering, "_show_capability", lambda: partita.compare(torch.sin, torch.sin, (torch.ones(2),)))
    assert lowering.show()
    assert "skipped" in capsys.readouterr().out


def test_the_chapter_on_lowering_compiles_equal_regions_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lowering, "find_spec", lambda name: None)
    # With another `max_variants`, nothing is shared with what other tests have compiled.
    monkeypatch.setattr(with_inductor, "Lower", lambda name: Lower("aot_eager", max_variants=5))
    with caplog.at_level(logging.INFO, "partita.lowering"):
        assert with_inductor.main() == 0
    assert capsys.readouterr().out.startswith("  4 regions do at least 300,000 FLOPs")
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["compiling", "compiled"] * 2


def test_the_chapter_on_recomputation_holds_less_with_the_same_losses(demo: str) -> None:
    lines = demo.partition("\n6. ")[2].partition("\n7. ")[0].splitlines()
    assert sum(line.startswith("blocks_") and "Recompute(" in line for line in lines) == 4
    rows = [line.split() for line in lines if line.startswith(("  plain ", "  recomputed "))]
    held, losses = {name: words for name, *words in rows[:2]}, {name: words for name, *words in rows[2:]}
    bytes_held = {name: int(words[2].replace(",", "")) for name, words in held.items()}
    assert bytes_held["recomputed"] * 10 < bytes_held["plain"]
    assert len(losses["plain"]) == 3
    assert losses["plain"] == losses["recomputed"]
    assert "losses, parameters and the mutated buffer: same, bit for bit" in lines


def test_the_chapter_on_recomputation_tells_losses_that_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter(([3.0, 2.0, 1.0], [3.0, 2.0, 1.5]))
    monkeypatch.setattr(recomputing, "_trained", lambda module, ids: next(losses))
    assert not recomputing.show()
    assert "DIFFERENT" in capsys.readouterr().out


def test_the_chapter_on_recomputation_tells_a_wrong_prediction(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recomputing, "_saved_bytes", lambda module, ids: 1_000_000)
    assert not recomputing.show()
    assert "same, bit for bit" in capsys.readouterr().out


def test_a_chapter_that_fails_is_told_by_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("partita_cli.demo._CHAPTERS", ("splitting", "fitting"))
    monkeypatch.setattr(fitting, "show", lambda: True)
    monkeypatch.setattr(splitting, "show", lambda: False)
    assert main(["demo", "-o", str(tmp_path / "demo.html")]) == 1
    assert "did not hold" in capsys.readouterr().out


def test_the_demo_ends_with_a_page(demo: str) -> None:
    (line,) = [line for line in demo.splitlines() if line.endswith("partita-demo.html")]
    page = Path(line.rpartition(": ")[2])
    assert page.parent.name.startswith("with_python_files")
    assert page.read_text().lower().startswith("<!doctype html>")


def test_the_chapters_on_repeats_budgets_and_plan_files_hold(demo: str) -> None:
    repeats = demo.partition("\n5. ")[2].partition("\n6. ")[0]
    assert "repeat_0: 4 calls of 16 nodes" in repeats
    fitted = demo.partition("\n7. ")[2].partition("\n8. ")[0]
    assert "█ planned" in fitted
    assert "compared, with dropout: nothing differs" in fitted
    files = demo.partition("\n8. ")[2].partition("\n9. ")[0]
    assert "the plans are equal" in files
    assert "refused: plan.json is a plan for another program" in files


def test_the_chapter_on_bisection_finds_the_operator(demo: str) -> None:
    told = demo.partition("\n9. ")[2]
    assert "1 of its 7 nodes, 'linear_8', suffice" in told


def test_the_chapter_on_bisection_tells_where_nothing_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bisecting, "Lower", lambda backend: Lower("eager"))
    assert not bisecting.show()
    assert "five regions, compiled: nothing differs" in capsys.readouterr().out
