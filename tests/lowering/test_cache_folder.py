"""Compiled functions in a folder: found by the next process, never mistaken for others, and never in the way."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from tests.helpers.selecting import slow_but
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import partita
from partita.errors import OptionError
from partita.lowering._torch import origins
from partita.policies import BySize, Repeats
from partita.treatments import Lower


class Counting:
    """A backend that counts its compilations, and whose stored functions are the name of an operator."""

    name: ClassVar[str] = "counting"
    trains: ClassVar[bool] = True
    takes_symbols: ClassVar[bool] = True
    compiled = 0

    def __repr__(self) -> str:
        return "Counting()"

    def refusal(self, node: Node) -> str | None:
        return None

    def compile(self, body: GraphModule, inputs: Any) -> Any:
        Counting.compiled += 1
        return body

    def save(self, function: Any) -> bytes:
        import pickle

        return pickle.dumps(function)

    def load(self, data: bytes) -> Any:
        import pickle

        return pickle.loads(data)


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    Counting.compiled = 0


class _Model(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * (1 + self.rate) + 1
        return x


def _applied(model: nn.Module, folder: Path, x: Tensor, policy: Any = None) -> nn.Module:
    """A new lowered program, as another process would make it: nothing is shared but the folder."""
    return _lowered(partita.capture(model, (x,)), folder, policy)


def _lowered(program: partita.Program, folder: Path, policy: Any = None) -> nn.Module:
    lower = Lower(Counting(), cache=folder, strict=True)
    return partita.plan(program, policy or BySize(parts=2), lower).apply().module()


def test_the_next_program_compiles_nothing(tmp_path: Path) -> None:
    model, x = _Model(), torch.randn(2, 4)
    assert torch.equal(_applied(model, tmp_path, x)(x), model(x))
    first, Counting.compiled = Counting.compiled, 0
    assert torch.equal(_applied(model, tmp_path, x)(x), model(x))
    assert (first, Counting.compiled) == (2, 0)


def test_other_weights_of_an_equal_body_use_the_same_entry(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    for _ in range(2):
        model = _Model()
        assert torch.equal(_applied(model, tmp_path, x, Repeats())(x), model(x))
    assert Counting.compiled == len(list(tmp_path.rglob("*.function")))


@pytest.mark.parametrize("other", [_Model(rate=0.5), _Model().double(), _Model().requires_grad_(False)])
def test_what_differs_is_compiled(tmp_path: Path, other: nn.Module) -> None:
    model = _Model()
    for one in (model, other):
        x = torch.randn(2, 4, dtype=next(one.parameters()).dtype)
        Counting.compiled = 0
        assert torch.equal(_applied(one, tmp_path, x)(x), one(x))
        assert Counting.compiled == 2


def test_another_size_is_compiled_and_found_again(tmp_path: Path) -> None:
    model = _Model()
    for _ in range(2):
        for rows in (2, 3):
            x = torch.randn(rows, 4)
            assert torch.equal(_applied(model, tmp_path, x)(x), model(x))
    assert Counting.compiled == 4


def test_gradients_flow_through_what_was_loaded(tmp_path: Path) -> None:
    model, x = _Model(), torch.randn(2, 4)
    expected = torch.autograd.grad(model(x).sum(), model.layers[0].weight)
    for _ in range(2):
        found = torch.autograd.grad(_applied(model, tmp_path, x)(x).sum(), model.layers[0].weight)
        assert torch.equal(found[0], expected[0])


def _flipped(data: bytes, *, eighth: int) -> bytes:
    place = len(data) * eighth // 8
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


_SPOILT: tuple[Callable[[bytes], bytes], ...] = (
    lambda data: data[: len(data) // 2],
    lambda data: data[:-3],
    lambda data: b"",
    lambda data: data + b"x",
    *(partial(_flipped, eighth=eighth) for eighth in range(8)),
)


@pytest.mark.parametrize("spoil", slow_but(_SPOILT, _SPOILT[0], _SPOILT[7]))
def test_a_damaged_entry_is_a_message_and_a_compilation(
    tmp_path: Path, spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = _Model(), torch.randn(2, 4)
    _applied(model, tmp_path, x)(x)
    for path in tmp_path.rglob("*.function"):
        path.write_bytes(spoil(path.read_bytes()))
    Counting.compiled = 0
    with caplog.at_level(logging.WARNING, "partita"):
        assert torch.equal(_applied(model, tmp_path, x)(x), model(x))
    assert Counting.compiled == 2
    assert "is damaged, so it is removed and its function compiled again" in caplog.text
    caplog.clear()
    assert _applied(model, tmp_path, x)(x).equal(model(x))
    assert Counting.compiled == 2
    assert "damaged" not in caplog.text


def test_a_damaged_entry_that_cannot_be_removed_is_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, x = _Model(), torch.randn(2, 4)
    _applied(model, tmp_path, x)(x)
    for path in tmp_path.rglob("*.function"):
        path.write_bytes(b"")
    with patch.object(Path, "unlink", side_effect=PermissionError("read only")):
        assert torch.equal(_applied(model, tmp_path, x)(x), model(x))
    assert "is damaged" in caplog.text


def test_an_entry_at_the_place_of_another_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The two bodies are called alike, so that only the place tells the functions apart."""
    one, other, x = _Model(), _Model(rate=0.5), torch.randn(2, 4)
    for model, folder in ((one, tmp_path / "one"), (other, tmp_path / "other")):
        _applied(model, folder, x, BySize(parts=1))(x)
    (source,), (target,) = (list((tmp_path / name).rglob("*.function")) for name in ("one", "other"))
    target.write_bytes(source.read_bytes())
    Counting.compiled = 0
    assert torch.equal(_applied(other, tmp_path / "other", x, BySize(parts=1))(x), other(x))
    assert Counting.compiled == 1
    assert "or belong to another folder" in caplog.text


def test_a_function_that_cannot_be_loaded_is_a_message_and_a_compilation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = _Model(), torch.randn(2, 4)
    _applied(model, tmp_path, x)(x)

    def refuse(self: Counting, data: bytes) -> Any:
        raise ValueError("made by another build")

    monkeypatch.setattr(Counting, "load", refuse)
    assert torch.equal(_applied(model, tmp_path, x)(x), model(x))
    assert Counting.compiled == 4
    assert "cannot load a function, so it is compiled again: made by another build" in caplog.text


def test_half_written_files_are_no_entries(tmp_path: Path) -> None:
    model, x = _Model(), torch.randn(2, 4)
    _applied(model, tmp_path, x)(x)
    for folder in tmp_path.iterdir():
        (folder / "abc.tmp").write_bytes(b"partita")
    Counting.compiled = 0
    _applied(model, tmp_path, x)(x)
    assert Counting.compiled == 0


@contextmanager
def _set(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@pytest.mark.parametrize(
    "changed",
    [
        lambda: torch._inductor.config.patch(max_fusion_size=7),
        lambda: torch._functorch.config.patch(activation_memory_budget=0.5),
        lambda: _set(torch.get_num_threads, torch.set_num_threads, 2),
        lambda: _set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
        lambda: _set(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
        lambda: _set(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.no_grad(),
        lambda: torch.inference_mode(),
        lambda: patch.object(torch, "__version__", "2.0.0"),
        lambda: patch.object(Counting, "__repr__", lambda self: "Counting(level=2)"),
        lambda: patch.object(Counting, "version", "2", create=True),
        lambda: patch("partita.lowering.cache_folder.digest_of_partita", lambda: "another version"),
        lambda: patch("partita.lowering.cache_folder.instructions", lambda: ["sse"]),
    ],
)
def test_what_decides_the_code_decides_the_entry(tmp_path: Path, changed: Callable[[], Any]) -> None:
    x = torch.randn(2, 4)
    program = partita.capture(_Model(), (x,))
    _lowered(program, tmp_path)(x)
    assert Counting.compiled == 2
    with changed():
        _lowered(program, tmp_path)(x)
    assert Counting.compiled == 4
    _lowered(program, tmp_path)(x)
    assert Counting.compiled == 4


def test_dynamic_sizes_are_part_of_an_entry(tmp_path: Path) -> None:
    """A function for one size is not used for others, and one for all sizes serves them."""
    model, x = _Model(), torch.randn(3, 4)
    rows = torch.export.Dim("rows", min=2, max=64)
    _applied(model, tmp_path, x)(x)
    assert Counting.compiled == 2
    for size in (5, 7):
        other = torch.randn(size, 4)
        program = partita.capture(model, (x,), dynamic_shapes=({0: rows},))
        assert torch.equal(_lowered(program, tmp_path)(other), model(other))
    assert Counting.compiled == 4


def test_a_failed_write_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, x = _Model(), torch.randn(2, 4)
    with patch("os.replace", side_effect=OSError("no space left")):
        assert torch.equal(_applied(model, tmp_path, x)(x), model(x))
    assert "a function cannot be written to" in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_code_that_another_process_may_not_have_is_not_cached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def mine(x: Tensor) -> Tensor:
        return x + 1

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(mine, (x,)))
    with caplog.at_level(logging.INFO, "partita"):
        lowered = Lower(Counting(), cache=tmp_path).treat(GraphModule(nn.Module(), graph))
        assert torch.equal(lowered(torch.zeros(2)), torch.ones(2))
    assert not list(tmp_path.rglob("*.function"))
    assert "is not cached in a folder: its code may change between processes" in caplog.text


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Installs a package with an operator; called with what is said about the installation, and its version."""
    root = tmp_path / "installed"
    package, about = root / "partita_test_ops", root / "partita_test_ops-1.dist-info"
    for folder in (package, about):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text(_PACKAGE)
    monkeypatch.syspath_prepend(root)

    def install(version: str, *, recorded: Sequence[str] = ("__init__.py",), **info: object) -> Any:
        (about / "RECORD").write_text("".join(f"partita_test_ops/{file},,\n" for file in recorded))
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: partita_test_ops\nVersion: {version}\n")
        (about / "direct_url.json").write_text(json.dumps({"url": "file:///x", "dir_info": info}))
        importlib.invalidate_caches()
        origins._installed_version.cache_clear()
        return importlib.import_module("partita_test_ops").double.default

    yield install
    sys.modules.pop("partita_test_ops", None)
    origins._installed_version.cache_clear()


_PACKAGE = """
import torch

@torch.library.custom_op("partita_test_ops::double", mutates_args=())
def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@_double.register_fake
def _fake(x):
    return torch.empty_like(x)

double = torch.ops.partita_test_ops.double
"""


def _entries_of_operator(op: Any, folder: Path) -> int:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(op, (graph.placeholder("x"),)))
    lowered = Lower(Counting(), cache=folder).treat(GraphModule(nn.Module(), graph))
    assert torch.equal(lowered(torch.ones(2)), torch.full((2,), 2.0))
    return len(list(folder.rglob("*.function")))


def test_operators_of_an_installed_package_are_cached_for_its_version(
    packaged: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    assert _entries_of_operator(packaged("1.0"), folder) == 1
    assert _entries_of_operator(packaged("1.0"), folder) == 1
    assert _entries_of_operator(packaged("2.0"), folder) == 2


def test_operators_whose_code_may_change_are_not_cached(packaged: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert _entries_of_operator(packaged("1.0", editable=True), folder) == 0
    assert _entries_of_operator(packaged("1.0", recorded=()), folder) == 0
    assert _entries_of_operator(packaged("1.0", recorded=["other/__init__.py"]), folder) == 0
    op = packaged("1.0")
    torch.library.register_fake("partita_test_ops::double", lambda x: torch.empty_like(x))
    assert _entries_of_operator(op, folder) == 0


def test_operators_in_a_folder_of_sources_are_not_cached(packaged: Callable[..., Any], tmp_path: Path) -> None:
    """setuptools leaves metadata beside the sources, which say a version but may be edited at any time."""
    about = tmp_path / "installed" / "partita_test_ops-1.dist-info"
    op = packaged("1.0")
    about.rename(about.with_name("partita_test_ops.egg-info"))
    sources = about.with_name("partita_test_ops.egg-info")
    (sources / "METADATA").rename(sources / "PKG-INFO")
    (sources / "RECORD").unlink()
    (sources / "direct_url.json").unlink()
    (sources / "SOURCES.txt").write_text("partita_test_ops/__init__.py\n")
    importlib.invalidate_caches()
    origins._installed_version.cache_clear()
    assert _entries_of_operator(op, tmp_path / "cache") == 0


def test_a_folder_that_cannot_be_written_is_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, x = _Model(), torch.randn(2, 4)
    module = _applied(model, tmp_path / "later", x)
    (tmp_path / "later").write_text("a file by now")
    assert torch.equal(module(x), model(x))
    assert "a function cannot be written to" in caplog.text


def test_what_cannot_be_a_cache_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OptionError, match="is a file"):
        Lower("inductor", cache=file)
    with pytest.raises(OptionError, match="cache is a folder for compiled functions, not 3"):
        Lower("inductor", cache=3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="'aot_eager' has no `save` and `load`"):
        Lower("aot_eager", cache=tmp_path)


_SCRIPT = """
import sys, torch, partita
from partita.policies import BySize
from partita.treatments import Lower
torch.set_num_threads(1)
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)), torch.randn(2, 4)
plan = partita.plan(partita.capture(model, (x,)), BySize(parts=1), Lower("inductor", cache=sys.argv[1], strict=True))
module = plan.apply().module()
loss = module(x).square().sum()
loss.backward()
torch.testing.assert_close(loss, model(x).square().sum())
print([one.loaded for one in plan.compilations])
"""

#: A C++ compiler that notes what it builds: preprocessing and headers do not count.
_NOTING = """#!/bin/sh
case "$*" in *" -E "*|*.h" "*|*.h.gch*|*--version*|*-dumpversion*) ;; *-shared*|*" -c "*) echo "$*" >> "$BUILT" ;; esac
exec g++ "$@"
"""


def _start(folder: Path, caches: Path) -> subprocess.Popen[str]:
    """The script in a process with its own caches of Inductor, which notes what the compiler builds."""
    caches.mkdir()
    compiler = caches.parent / "g++"  # Its path is one of the settings of Inductor.
    compiler.write_text(_NOTING)
    compiler.chmod(0o755)
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "CXX": str(compiler),
        "BUILT": str(caches / "built"),
    }
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(folder)],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _printed(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return out.strip()


@pytest.mark.slow
def test_a_second_process_builds_nothing(tmp_path: Path) -> None:
    """It has nothing but the folder: the caches of Inductor are empty."""
    for name, loaded in (("first", "[False]"), ("second", "[True]")):
        assert _printed(_start(tmp_path / "folder", tmp_path / name)) == loaded
    assert "-shared" in (tmp_path / "first" / "built").read_text()
    assert not (tmp_path / "second" / "built").exists()


@pytest.mark.slow
def test_damaged_kernels_are_built_again(tmp_path: Path) -> None:
    """A process that calls a library that was cut off ends by a signal."""
    assert _printed(_start(tmp_path / "folder", tmp_path / "first")) == "[False]"
    kernels = list((tmp_path / "folder" / "kernels").glob("*/*.so.*"))
    for path in kernels:
        path.write_bytes(path.read_bytes()[:3000])
    process = _start(tmp_path / "folder", tmp_path / "second")
    out, err = process.communicate(timeout=500)
    assert (process.returncode, out.strip()) == (0, "[True]"), err
    assert err.count("is damaged, so it is removed and built again") == len(kernels)


@pytest.mark.slow
def test_processes_share_a_folder_at_the_same_time(tmp_path: Path) -> None:
    both = [_start(tmp_path / "folder", tmp_path / name) for name in ("one", "other")]
    assert all(_printed(process) in ("[False]", "[True]") for process in both)
    assert not list((tmp_path / "folder").glob("*/*.tmp"))
    assert _printed(_start(tmp_path / "folder", tmp_path / "later")) == "[True]"


_WRITER = """
import sys, torch
from partita.lowering.cache_folder import CacheFolder
folder = CacheFolder(__import__("pathlib").Path(sys.argv[1]), "code", "backend")
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 150):
    folder.store(("entry", number % 40, b"x" * 20000))
    for entry in folder.entries():
        assert entry[0] == "entry" and len(entry[2]) == 20000, entry
print(len(list(folder.entries())))
"""


@pytest.mark.slow
def test_readers_and_writers_at_the_same_time_see_whole_entries(tmp_path: Path) -> None:
    """Two processes write the same entries and read all of them, without a warning."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(first)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for first in (0, 20)
    ]
    for process in started:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert "damaged" not in err
        assert out.strip() == "40"
