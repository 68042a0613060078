"""How all tests run: hypothesis profiles, one torch thread, a known random state."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.helpers.browsers import NO_BROWSER

from partita._torch import gc_pause
from partita._torch.modes import read_ambient, restore_autocast

# OpenVINO reports its use over the network, from a forked process, unless it runs in CI.
os.environ.setdefault("CI", "true")

# One profile is small and the same in every run; the other looks for new graphs and remembers those that failed.
settings.register_profile(
    "quick",
    max_examples=8,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz",
    max_examples=2000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Tests run side by side, and sums must not depend on how many threads share them.
torch.set_num_threads(1)

# The processes in which Inductor compiles in parallel would import torch once more beside each of ours.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Inductor's cache (torch 2.13) takes code that is written for longer vectors than those of the CPU that is played.
if played := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{os.getuid()}_{played}")

# pytest gives each logger that does not propagate handlers of its own, and torch would write all its graphs for them.
for _trace in ("torch.__trace", "torch.__dtrace"):
    logging.getLogger(_trace).propagate = True

# Seeding accelerators that are not there costs more than most tests: each call remembers its stack for a later start.
_seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed

# What compilers cache makes every full collection long, so there are fewer of them.
gc.set_threshold(5_000, 20, 50)


ROOT = Path(__file__).resolve().parents[1]
#: What tools keep in the tree; git does not see it.
CACHES = frozenset(
    (".git", ".venv", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache", "__pycache__", "build")
)
_TREE = pytest.StashKey[frozenset[Path]]()


def files_in_the_tree() -> frozenset[Path]:
    found, waiting = set[Path](), [ROOT]
    while waiting:
        inside = [entry for entry in waiting.pop().iterdir() if entry.name not in CACHES]
        found.update(inside)
        waiting += [entry for entry in inside if entry.is_dir() and not entry.is_symlink()]
    return frozenset(found)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # Only the process that others work for.
        session.config.stash[_TREE] = files_in_the_tree()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that leaves files behind fails."""
    before = session.config.stash.get(_TREE, None)
    left = sorted(files_in_the_tree() - before) if before is not None else []
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\nthe run left {', '.join(map(str, left))} behind in the tree", red=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tests that need a browser are skipped without one, which is said even where nothing else is."""
    skipped = sum(NO_BROWSER in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    if skipped:
        terminalreporter.write_line(f"{skipped} tests were skipped: {NO_BROWSER}", yellow=True)


@pytest.fixture(autouse=True)
def _warnings_are_logged() -> Iterator[None]:
    """Some libraries set the level of the root logger: OpenVINO when it converts a model."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)


@pytest.fixture(autouse=True)
def _known_random_state() -> None:
    _seed(0)


@pytest.fixture
def quick_collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A full collection looks only at what the test itself makes, not at all that compilers have cached."""
    monkeypatch.setattr(gc_pause, "_age_new_objects", lambda: None)  # It would count all that is frozen, and no more.
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _guards_are_not_timed() -> None:
    """Dynamo (torch 2.13) flushes the CPU's caches to time the guards of each frame, for a debug message."""
    if guards := sys.modules.get("torch._dynamo.guards"):
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0


@pytest.fixture(autouse=True)
def _modes_as_they_were() -> Iterator[None]:
    """Some tests run graphs that leave a mode switched; the tests after them shall not know."""
    before = read_ambient()
    yield
    torch.set_grad_enabled(before.grad)
    restore_autocast(before)
