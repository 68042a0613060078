"""`partita capture` writes what Python captures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.partita_cli.helpers import refused, run

import partita

_MODELS = """
import torch
from torch import nn

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout()

    def forward(self, x, scale=None, *, mask=None):
        with torch.no_grad():
            y = x * 2 if scale is None else x * scale
        y = self.drop(self.linear(y))
        return y if mask is None else y * mask

x = torch.randn(4, 8)

def build():
    return Both().eval(), (x,)

def with_keywords():
    return Both().eval(), ((x,), {"mask": torch.ones(4, 8)})

def three():
    return Both().eval(), (x,), {"mask": torch.ones(4, 8)}

def raising():
    raise ValueError("no weights\\nhere")

def nothing():
    return None

def uncapturable():
    return (lambda x: x if x.sum() > 0 else -x), (x,)

number = 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "command_models.py").write_text(_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("command_models", None)


@pytest.mark.parametrize("function", ["command_models:build", "command_models.py:build"])
def test_a_model_is_captured_from_a_module_or_a_file(function: str) -> None:
    ran = run("capture", function, "-o", "model.pt2")
    assert (ran.status, ran.err) == (0, "")
    assert "partita inspect model.pt2" in ran.out
    program = partita.Program.of("model.pt2")
    assert run("inspect", "model.pt2", "--json").json["modes"] == {"no_grad": 1}
    assert program.module()(torch.randn(4, 8)).shape == (4, 8)


def test_a_file_imports_its_neighbours_and_hides_no_module_of_python(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "command_neighbour.py").write_text(_MODELS)
    (folder / "command_entry.py").write_text("from command_neighbour import build")
    (tmp_path / "typing.py").write_text("raise ImportError('not the typing of the standard library')")
    assert run("capture", "models/command_entry.py:build", "-o", "model.pt2").status == 0
    assert all(Path(entry) not in (tmp_path, folder) for entry in sys.path[:-2])
    for name in ("command_neighbour", "command_entry"):
        sys.modules.pop(name)


@pytest.mark.parametrize("function", ["with_keywords", "three"])
def test_keyword_arguments_are_passed(function: str) -> None:
    run("capture", f"command_models:{function}", "-o", "model.pt2")
    inputs = run("inspect", "model.pt2", "--json").json["inputs"]
    assert [one["name"] for one in inputs] == ["x", "mask"]
    assert run("verify", "model.pt2", "-p", "size:parts=2").status == 0


@pytest.mark.parametrize(
    ("words", "shapes"),
    [
        (["x:0=batch:2..64", "mask:0=batch"], (["a", 8], ["a", 8])),
        (["x:0", "mask:0"], (["a", 8], ["a", 8])),
        (["auto"], (["a", 8], ["a", 8])),
    ],
)
def test_dynamic_sizes(words: list[str], shapes: tuple[list[object], ...]) -> None:
    options = [word for text in words for word in ("--dynamic", text)]
    assert run("capture", "command_models:with_keywords", "-o", "model.pt2", *options).status == 0
    found = run("inspect", "model.pt2", "--json").json
    (symbol,) = found["symbols"]
    assert [one["shape"] for one in found["inputs"]] == [
        [symbol if size == "a" else size for size in shape] for shape in shapes
    ]
    if "2..64" in words[0]:
        assert found["symbols"] == {symbol: "2 to 64"}


def test_a_model_is_switched_to_training() -> None:
    run("capture", "command_models:build", "-o", "model.pt2", "--train")
    assert len(run("inspect", "model.pt2", "--json").json["effects"]["random"]) == 1


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("nowhere.at.all:build", "there is no module 'nowhere'"),
        ("missing.py:build", "there is no file missing.py"),
        ("command_models:biuld", "did you mean 'build'?"),
        ("command_models", "write it as package.module:function"),
        ("command_models:number", "is an int, and no function"),
        ("command_models:raising", "raised ValueError: no weights"),
        ("command_models:nothing", "returns a NoneType"),
        ("command_models:uncapturable", "cannot be captured"),
    ],
)
def test_what_cannot_be_captured_is_refused_and_nothing_is_written(function: str, told: str) -> None:
    assert told in refused("capture", function, "-o", "model.pt2")
    assert [path.name for path in Path().glob("*.pt2")] + [path.name for path in Path().glob(".*")] == []


def test_a_module_that_fails_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("import a_package_that_is_missing")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    (tmp_path / "syntax.py").write_text("def f(:")
    assert "no module 'a_package_that_is_missing', which broken_module imports" in refused(
        "capture", "broken_module:f", "-o", "m.pt2"
    )
    assert "raised SystemExit" in refused("capture", "exits:f", "-o", "m.pt2")
    assert "SyntaxError" in refused("capture", "syntax.py:f", "-o", "m.pt2")


@pytest.mark.parametrize(
    ("dynamic", "told"),
    [
        ("x:0=b:64..2", "'0=b:64..2' has a least size above the most; write 0=b:2..64"),
        ("y:0=batch", "the inputs are x"),
        ("x:2=batch", "is no size of x, which has 2"),
        ("x:batch", "write x:0=batch"),
    ],
)
def test_wrong_dynamic_sizes_are_refused(dynamic: str, told: str) -> None:
    assert told in refused("capture", "command_models:build", "-o", "m.pt2", "--dynamic", dynamic)


def test_an_output_that_cannot_be_written_is_refused() -> None:
    assert "should end in .pt2" in refused("capture", "command_models:build", "-o", "model.onnx")
    assert "there is no folder" in refused("capture", "command_models:build", "-o", "nowhere/model.pt2")


def test_a_model_whose_containers_need_an_import_says_so(tmp_path: Path) -> None:
    (tmp_path / "command_containers.py").write_text(
        "from typing import NamedTuple\n"
        "import torch\n"
        "from torch.utils import _pytree\n\n"
        "class Both:\n"
        "    def __init__(self, one, two):\n"
        "        self.one, self.two = one, two\n\n"
        "_pytree.register_pytree_node(\n"
        "    Both, lambda b: ([b.one, b.two], None), lambda v, _: Both(*v), serialized_type_name='command.Both'\n"
        ")\n\n"
        "def build():\n"
        "    return (lambda x: Both(x + 1, x - 1)), (torch.randn(2),)\n"
    )
    ran = run("capture", "command_containers:build", "-o", "model.pt2")
    assert ran.out.rstrip().endswith("partita inspect model.pt2 --import command_containers")
    sys.modules.pop("command_containers")


@pytest.mark.models
def test_a_model_of_transformers_is_captured_inspected_and_verified(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "command_gpt2.py").write_text(
        "import torch\n"
        "from transformers import GPT2Config, GPT2LMHeadModel\n\n"
        "def build():\n"
        "    config = GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=31, n_positions=64, use_cache=False)\n"
        "    return GPT2LMHeadModel(config).eval(), {'input_ids': torch.randint(31, (1, 8))}\n"
    )
    captured = run("capture", "command_gpt2:build", "-o", "gpt2.pt2", "--dynamic", "input_ids:1=tokens:2..64")
    assert captured.status == 0, captured.err
    assert captured.out.rstrip().endswith("--import transformers.modeling_outputs")
    found = run("inspect", "gpt2.pt2", "--import", "transformers.modeling_outputs", "--json").json
    assert [one["calls"] for one in found["repeats"]] == [3]
    # Random tokens are within the vocabulary.
    assert run("verify", "gpt2.pt2", "-p", "repeats", "--no-gradients").out.startswith("nothing differs in 4 calls")
    sys.modules.pop("command_gpt2")


def test_a_file_may_have_the_name_of_a_module_of_python() -> None:
    code = "import torch\ndef build():\n    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)\n"
    Path("profile.py").write_text(code, encoding="utf-8")
    assert run("capture", "profile.py:build", "-o", "model.pt2").status == 0
    assert not hasattr(sys.modules.get("profile"), "build")


def test_limits_of_a_size_are_written_once() -> None:
    words = ("--dynamic", "x:0=b:2..8", "--dynamic", "mask:0=b:2..64")
    assert "other limits" in refused("capture", "command_models:with_keywords", "-o", "model.pt2", *words)
