"""Compiled functions in a folder: found by the next process, never mistaken for others, and never in the way."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import partita
from partita.errors import OptionError
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
    lower = Lower(Counting(), cache=folder, strict=True)
    return partita.plan(partita.capture(model, (x,)), policy or BySize(parts=2), lower).apply().module()


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


@pytest.mark.parametrize("spoil", [lambda data: data[:-3], lambda data: b"", lambda data: data[:60] + b"x" + data[61:]])
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
    assert "is damaged or of another version, so its function is compiled again" in caplog.text
    assert _applied(model, tmp_path, x)(x).equal(model(x))
    assert Counting.compiled == 2


def test_half_written_files_are_no_entries(tmp_path: Path) -> None:
    model, x = _Model(), torch.randn(2, 4)
    _applied(model, tmp_path, x)(x)
    for folder in tmp_path.iterdir():
        (folder / "abc.tmp").write_bytes(b"partita")
    Counting.compiled = 0
    _applied(model, tmp_path, x)(x)
    assert Counting.compiled == 0


def test_other_settings_of_the_compiler_are_other_entries(tmp_path: Path) -> None:
    model, x = _Model(), torch.randn(2, 4)
    _applied(model, tmp_path, x)(x)
    with torch._inductor.config.patch(max_fusion_size=7):
        _applied(model, tmp_path, x)(x)
    assert Counting.compiled == 4


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
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)), torch.randn(2, 4)
plan = partita.plan(partita.capture(model, (x,)), BySize(parts=1), Lower("inductor", cache=sys.argv[1], strict=True))
module = plan.apply().module()
loss = module(x).square().sum()
loss.backward()
torch.testing.assert_close(loss, model(x).square().sum())
print([one.loaded for one in plan.compilations])
"""


@pytest.mark.slow
def test_a_second_process_loads_what_inductor_made(tmp_path: Path) -> None:
    for loaded in ("[False]", "[True]"):
        command = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == loaded
