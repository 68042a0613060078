"""Real consumers of `split_module` run with ours in the place of torch's, and compute what they did before."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx.passes.split_module
from tests.helpers.selecting import slow_but
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter
from torch.fx.graph import CodeGen

from partita.compat import split_module as ours

MODELS = ("llama", "gpt2", "bert", "t5", "whisper", "mixtral")


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> None:
    torch.compiler.reset()


# Pipelining ------------------------------------------------------------------------------------------------------


class Staged(nn.Module):
    """Three stages; a skip connection, a buffer and an input cross between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, ids: Tensor, bias: Tensor) -> Tensor:
        from torch.distributed.pipelining import pipe_split

        hidden = self.embedding(ids)
        skip = hidden * self.scale
        hidden = self.layers[1](self.layers[0](hidden))
        pipe_split()
        hidden = self.layers[2](hidden) + skip
        pipe_split()
        return self.head(self.layers[3](hidden) + bias)


def test_pipeline_stages_in_sequence_are_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.pipelining import _IR, pipeline

    counted = _Counted(ours.split_module)
    model, args = Staged(), (torch.randint(0, 16, (4, 5)), torch.randn(8))
    torchs = pipeline(model, args)
    monkeypatch.setattr(_IR, "split_module", counted)
    piped = pipeline(model, args)

    assert counted.parts == [3]
    assert piped.num_stages == torchs.num_stages == 3
    assert torch.equal(piped(*args), model(*args))
    assert torch.equal(_run_stages(piped, args), model(*args))
    piped.split_gm.graph.set_codegen(CodeGen())
    assert isinstance(torchs(*args), tuple)
    assert torch.equal(*(result[0] for result in (piped(*args), torchs(*args))))
    for number in range(3):
        stage, expected = piped.get_stage_module(number), torchs.get_stage_module(number)
        assert list(stage.state_dict()) == list(expected.state_dict())
        assert stage.code == expected.code


def _run_stages(piped: Any, args: tuple[Tensor, Tensor]) -> Tensor:
    ids, bias = args
    first, second, third = map(piped.get_stage_module, range(3))
    return third(second(*first(ids)), bias)


# Distributed data parallel ---------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Four layers, each as large as a bucket of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(520, 520) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(520) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = torch.relu_(norm(linear(x)))
        return x


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_ddp_splits_its_graph_by_buckets(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    counted = _Counted(ours.split_module)
    monkeypatch.setattr(torch.fx.passes.split_module, "split_module", counted)
    model = Layers()
    twin = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    call = torch.compile(wrapped, backend="aot_eager", dynamic=dynamic)
    for size in (8, 9 if dynamic else 8):
        batch = torch.randn(size, 520)
        found, expected = call(batch), twin(batch)
        found.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(found, expected)
    assert set(counted.parts) == {4}
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert all(map(torch.equal, model.buffers(), twin.buffers()))


# Models of the transformers library ------------------------------------------------------------------------------


@pytest.mark.models
@pytest.mark.parametrize("name", slow_but(MODELS, "gpt2", "t5"))
def test_models_cut_every_five_nodes_keep_their_values_at_two_lengths(name: str) -> None:
    model, counted = _model(name), _Counted(ours.split_module)
    call = torch.compile(model, backend=_every_five_nodes(counted), dynamic=True, fullgraph=True)
    for length in (7, 11):
        _assert_same_output(call, model, _inputs(name, length))
    assert len(counted.parts) == 1
    assert counted.parts[0] > 10


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("name", MODELS)
def test_models_with_fixed_sizes_cut_every_five_nodes_keep_their_values(name: str) -> None:
    model, counted = _model(name), _Counted(ours.split_module)
    call = torch.compile(model, backend=_every_five_nodes(counted), dynamic=False, fullgraph=True)
    _assert_same_output(call, model, _inputs(name, 7))
    assert counted.parts[0] > 10


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("name", MODELS)
def test_models_cut_every_five_nodes_keep_their_gradients(name: str) -> None:
    """Against Dynamo's uncut graph: it adds gradients in another order than the model itself, cut or not."""
    model, counted = _model(name), _Counted(ours.split_module)
    twin, inputs = copy.deepcopy(model), _inputs(name, 7)
    cut = torch.compile(model, backend=_every_five_nodes(counted), dynamic=True, fullgraph=True)
    uncut = torch.compile(twin, backend="eager", dynamic=True, fullgraph=True)
    cut(**inputs)[0].square().sum().backward()
    uncut(**inputs)[0].square().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.slow
@pytest.mark.models
def test_every_piece_of_llama_compiles_with_inductor() -> None:
    model, pieces = _model("llama"), []

    def backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        split = _split_every(20, graph_module, ours.split_module)
        return _Piecewise(split, pieces).run

    call = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for length in (7, 11):
        _assert_same_output(call, model, _inputs("llama", length), exact=False)
    assert len(pieces) > 5


class _Piecewise(Interpreter):
    """Calls each part of a split module through torch.compile."""

    def __init__(self, split: GraphModule, pieces: list[str]) -> None:
        super().__init__(split)
        self._pieces = pieces
        self._compiled: dict[str, Callable[..., Any]] = {}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target not in self._compiled:
            self._pieces.append(target)
            self._compiled[target] = torch.compile(self.fetch_attr(target), dynamic=True)
        return self._compiled[target](*args, **kwargs)


class _Counted:
    """A split function that remembers how many parts it made each time."""

    def __init__(self, split: Callable[..., GraphModule]) -> None:
        self._split = split
        self.parts: list[int] = []

    def __call__(self, *args: Any, **kwargs: Any) -> GraphModule:
        split = self._split(*args, **kwargs)
        self.parts.append(sum(name.startswith("submod_") for name, _ in split.named_children()))
        return split


def _every_five_nodes(split: Callable[..., GraphModule]) -> Callable[..., GraphModule]:
    return lambda graph_module, example_inputs: _split_every(5, graph_module, split)


def _split_every(count: int, graph_module: GraphModule, split: Callable[..., GraphModule]) -> GraphModule:
    numbers = itertools.count()
    return split(graph_module, None, lambda node: next(numbers) // count)


def _assert_same_output(call: Any, model: nn.Module, inputs: dict[str, Any], *, exact: bool = True) -> None:
    with torch.no_grad():
        found, expected = call(**inputs)[0], model(**inputs)[0]
    limits = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found, expected, **limits)


def _model(name: str) -> nn.Module:
    """A model of two layers and tiny widths, from a configuration alone."""
    transformers = pytest.importorskip("transformers")
    family, settings = _CONFIGURATIONS[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    return getattr(transformers, f"{family}Model")(config).eval()


def _inputs(name: str, length: int) -> dict[str, Any]:
    ids = torch.randint(3, 64, (2, length))
    if name == "bert":
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids.flip(0), "use_cache": False}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": ids, "use_cache": False}
    return {"input_ids": ids, "use_cache": False}


_DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_DECODER, "num_key_value_heads": 2, "use_cache": False}),
    "mixtral": ("Mixtral", {**_DECODER, "num_key_value_heads": 2, "num_local_experts": 4, "use_cache": False}),
    "bert": ("Bert", _DECODER),
    "gpt2": (
        "GPT2",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False, **_ENDS},
    ),
    "t5": (
        "T5",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "use_cache": False},
    ),
    "whisper": (
        "Whisper",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "decoder_start_token_id": 1,
            "use_cache": False,
            **_ENDS,
        },
    ),
}
