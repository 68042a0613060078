"""CUDA graphs of lowered regions: which calls are recorded, by which key, and what a replay reads, mutates and returns.

Recording itself needs a GPU: the last tests, and `benchmarks/device/cuda_graphs.py`. The others record with calls.
"""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita.backends import Inductor
from partita.errors import OptionError
from partita.lowering import cuda_graphs
from partita.lowering.cuda_graphs import CudaGraphs, FixedMemory, Recordings, refusal
from partita.lowering.lowered import Lowered
from partita.lowering.signature import Constant
from partita.lowering.variant import Fit, Variant
from partita.policies import AroundOperators, BySize
from partita.torch_compile import backend
from partita.treatments import Lower

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="recording a CUDA graph needs a GPU")


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale) + shift


def _lowered(model: nn.Module, *args: Tensor, dynamic: bool = True, **options: Any) -> tuple[Any, list[Lowered]]:
    """The module of a program with one region, captured for any number of rows, and its region."""
    rows = torch.export.Dim("rows", min=2, max=64)
    shapes = tuple({0: rows} if dynamic and arg.dim() > 1 else None for arg in args)
    program = partita.capture(model, args, dynamic_shapes=shapes)
    module = partita.plan(program, BySize(parts=1), Lower("eager", strict=True, **options)).apply().module()
    return module, [each for each in module.modules() if isinstance(each, Lowered)]


class _Repeated:
    """A recording without a GPU: fixed memory for what is copied, and a call in the place of kernels."""

    made: list[_Repeated]

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Any], static: Sequence[int], memory: Any) -> None:
        self.function, self.static = function, tuple(static)
        self.inputs = [
            value.clone() if isinstance(value, Tensor) and value.dim() and place not in static else value
            for place, value in enumerate(inputs)
        ]
        self.replays = 0
        _Repeated.made.append(self)

    def replay(self, inputs: Sequence[Any]) -> Sequence[Any]:
        self.replays += 1
        for place, value in enumerate(inputs):
            if isinstance(value, Tensor) and value.dim() and place not in self.static:
                self.inputs[place].copy_(value)
        return [output.clone() for output in self.function(*self.inputs)]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[_Repeated]:
    """Recordings by calls, on any device."""
    _Repeated.made = []
    monkeypatch.setattr(cuda_graphs.Recording, "of", _Repeated)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_graphs, "off_gpu", lambda signature: None)
    return _Repeated.made


@torch.no_grad()
def test_each_size_is_recorded_once_and_replayed_with_new_inputs(recorded: list[_Repeated]) -> None:
    model, shift = _Model(), torch.randn(4)
    module, _ = _lowered(model, torch.randn(3, 4), shift, cuda_graphs=True)
    for rows in (3, 5, 3, 5, 3):
        x = torch.randn(rows, 4)
        assert torch.equal(module(x, shift), model(x, shift))
    assert [one.replays for one in recorded] == [2, 1]


@torch.no_grad()
def test_only_chosen_sizes_are_recorded(recorded: list[_Repeated]) -> None:
    model, shift = _Model(), torch.randn(4)
    module, _ = _lowered(model, torch.randn(3, 4), shift, cuda_graphs=(4, 8))
    for rows in (3, 4, 5, 8, 4):
        x = torch.randn(rows, 4)
        assert torch.equal(module(x, shift), model(x, shift))
    assert [one.replays for one in recorded] == [1, 0]


@torch.no_grad()
def test_weights_and_buffers_are_read_where_they_are(recorded: list[_Repeated]) -> None:
    model, x, shift = _Model(), torch.randn(3, 4), torch.randn(4)
    module, _ = _lowered(model, x, shift, cuda_graphs=True)
    module(x, shift)
    model.linear.weight.mul_(2)
    model.scale.add_(1)
    assert torch.equal(module(x, shift), model(x, shift))
    (one,) = recorded
    assert len(one.static) == 3
    assert one.replays == 1


@torch.no_grad()
def test_a_weight_at_another_address_is_recorded_again(recorded: list[_Repeated]) -> None:
    model, x, shift = _Model(), torch.randn(3, 4), torch.randn(4)
    module, _ = _lowered(model, x, shift, cuda_graphs=True)
    module(x, shift)
    before = module.linear.weight.data
    module.linear.weight.data = torch.randn(4, 4)
    model.linear.weight.data = module.linear.weight.data
    assert torch.equal(module(x, shift), model(x, shift))
    assert len(recorded) == 2
    module.linear.weight.data = model.linear.weight.data = before
    assert torch.equal(module(x, shift), model(x, shift))
    assert [one.replays for one in recorded] == [1, 0]


@torch.no_grad()
def test_static_inputs_are_not_copied(recorded: list[_Repeated]) -> None:
    model, x, shift = _Model(), torch.randn(3, 4), torch.randn(4)
    module, _ = _lowered(model, x, shift, cuda_graphs=True, static_inputs=("shift",))
    module(x, shift)
    shift.fill_(3)
    assert torch.equal(module(x, shift), model(x, shift))
    other = torch.randn(4)
    assert torch.equal(module(x, other), model(x, other))
    assert [(len(one.static), one.replays) for one in recorded] == [(4, 1), (4, 0)]


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.sum(0))
        return x * self.seen


@torch.no_grad()
def test_a_mutated_buffer_is_mutated_by_each_replay(recorded: list[_Repeated]) -> None:
    model = _Counts()
    module, _ = _lowered(_Counts(), torch.randn(3, 4), cuda_graphs=True)
    for _ in range(3):
        x = torch.randn(3, 4)
        version = module.seen._version
        assert torch.equal(module(x), model(x))
        assert torch.equal(module.seen, model.seen)
        assert module.seen._version > version
    assert [one.replays for one in recorded] == [2]


def _mutating(x: Tensor) -> Tensor:
    return x.add_(1) * 2


@torch.no_grad()
def test_an_input_that_is_mutated_is_recorded_if_it_is_static(
    recorded: list[_Repeated], caplog: pytest.LogCaptureFixture
) -> None:
    for static, count in (((), 0), (("x",), 1)):
        module, _ = _lowered(_as_module(_mutating), torch.zeros(3, 4), cuda_graphs=True, static_inputs=static)
        x = torch.zeros(3, 4)
        assert torch.equal(module(x), torch.full((3, 4), 2.0))
        assert torch.equal(module(x), torch.full((3, 4), 4.0))
        assert len(recorded) == count
    assert "it mutates its input 0, and would mutate a copy; see static_inputs" in caplog.text


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.rand_like(x) + x, "has a side effect or uses random numbers"),
        (lambda x: (x * 2, x.view(-1)), None),
        (lambda x: x.to(torch.float64) + 1, None),
        (lambda x: nn.functional.dropout(x, 0.5, training=False) + 1, None),
    ],
)
@torch.no_grad()
def test_what_a_replay_would_not_repeat_is_not_recorded(
    recorded: list[_Repeated], caplog: pytest.LogCaptureFixture, function: Any, reason: str | None
) -> None:
    module, _ = _lowered(_as_module(function), torch.randn(3, 4), cuda_graphs=True)
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.manual_seed(1)
        found = module(x)
        torch.manual_seed(1)
        torch.testing.assert_close(found, function(x), rtol=0, atol=0)
    assert len(recorded) == (reason is None)
    assert reason is None or reason in caplog.text


def test_calls_with_gradients_are_not_recorded(recorded: list[_Repeated], caplog: pytest.LogCaptureFixture) -> None:
    model, x, shift = _Model(), torch.randn(3, 4), torch.randn(4)
    module, _ = _lowered(model, x, shift, cuda_graphs=True)
    module(x, shift).sum().backward()
    assert not recorded
    assert "a backward may follow; call it under torch.no_grad()" in caplog.text
    with torch.no_grad():
        module(x, shift), module(x, shift)
    assert [one.replays for one in recorded] == [1]


@torch.no_grad()
def test_a_recording_that_fails_is_a_message_and_a_call(
    recorded: list[_Repeated], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs.Recording, "of", fail)
    model, x, shift = _Model(), torch.randn(3, 4), torch.randn(4)
    module, _ = _lowered(model, x, shift, cuda_graphs=True)
    for _ in range(3):
        assert torch.equal(module(x, shift), model(x, shift))
    assert caplog.text.count("recording failed: operation not permitted when stream is capturing") == 1


@torch.no_grad()
def test_too_many_recordings_are_a_message(
    recorded: list[_Repeated], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_RECORDINGS", 3)
    model, shift = _Model(), torch.randn(4)
    module, _ = _lowered(model, torch.randn(3, 4), shift, cuda_graphs=True)
    for rows in range(2, 20):
        x = torch.randn(rows, 4)
        assert torch.equal(module(x, shift), model(x, shift))
    assert len(recorded) == 6
    assert caplog.text.count("it has been recorded 6 times; choose sizes") == 1


@pytest.mark.usefixtures("quick_collections")
def test_recordings_do_not_keep_functions_alive() -> None:
    module, (lowered,) = _lowered(_Model(), torch.randn(3, 4), torch.randn(4), cuda_graphs=True)
    graphs = CudaGraphs(lowered.lowering)
    variant = Variant(Fit.exactly(_signature_of(module)), lambda *args: ())
    call = lowered._dispatcher._calls.of([torch.randn(3, 4)])
    graphs.of(variant, call, (), lowered.lowering)
    gone = weakref.ref(variant)
    del variant
    gc.collect()
    assert gone() is None


def test_a_key_tells_sizes_strides_numbers_and_static_addresses_apart(recorded: list[_Repeated]) -> None:
    variant = _variant(lambda x, n, w: (x * n + w,))
    recordings = Recordings(variant, "it", None, static={2}, memory=FixedMemory())
    w, other = torch.randn(3), torch.randn(3)
    calls = [(torch.randn(2, 3), 2, w), (torch.randn(2, 3).t().contiguous().t(), 2, w), (torch.randn(2, 3), 3, w)]
    calls += [(torch.randn(4, 3), 2, w), (torch.randn(2, 3), 2, other)]
    for inputs in (*calls, *calls):
        (found,) = recordings.run(variant, inputs)
        assert torch.equal(found, inputs[0] * inputs[1] + inputs[2])
    assert [one.replays for one in recorded] == [1] * 5


@torch.no_grad()
def test_a_number_in_a_tensor_on_the_cpu_is_part_of_the_key(recorded: list[_Repeated]) -> None:
    """Kernels get it by value."""

    def scaled(x: Tensor, by: Tensor) -> Tensor:
        return x * by

    module, _ = _lowered(_Two(scaled), torch.randn(3, 4), torch.tensor(2.0), cuda_graphs=True)
    for by in (2.0, 3.0, 2.0, 3.0, -0.0, 0.0):
        x = torch.randn(3, 4)
        found = module(x, torch.tensor(by))
        assert torch.equal(torch.signbit(found), torch.signbit(x * by))
        assert torch.equal(found, x * by)
    assert [one.replays for one in recorded] == [1, 1, 0, 0]


class _Two(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


@torch.no_grad()
def test_without_a_gpu_it_says_once_that_nothing_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    plan = partita.plan(partita.capture(model, (x,)), BySize(parts=3), Lower("eager", cuda_graphs=True))
    module = plan.apply().module()
    for _ in range(2):
        assert torch.equal(module(x), model(x))
    assert caplog.text.count("its inputs are on cpu, not on one GPU; torch finds none here") == 1


@torch.no_grad()
def test_copies_and_pickles_record_anew(recorded: list[_Repeated]) -> None:
    model, x, shift = _Model(), torch.randn(3, 4), torch.randn(4)
    module, _ = _lowered(model, x, shift, cuda_graphs=(3,), static_inputs=["shift"])
    module(x, shift)
    again = pickle.loads(pickle.dumps(module))
    for _ in range(2):
        assert torch.equal(again(x, shift), model(x, shift))
    assert [(len(one.static), one.replays) for one in recorded] == [(4, 0), (4, 1)]


@torch.no_grad()
def test_inside_torch_compile_pieces_are_recorded(recorded: list[_Repeated]) -> None:
    model, shift = _Model(), torch.randn(4)
    torch.compiler.reset()
    options = {
        "policy": AroundOperators(torch.tanh),
        "treatment": Lower("eager", cuda_graphs=(3, 4, 5), static_inputs=("shift",)),
    }
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True, options=options)
    for rows in (3, 5, 7, 3, 5, 7):
        x = torch.randn(rows, 4)
        assert torch.equal(compiled(x, shift), model(x, shift))
    assert [one.replays for one in recorded] == [1] * 6
    # The first piece has three tensors of the model, the last one the static input.
    assert sorted(len(one.static) for one in recorded) == [0, 0, 1, 1, 3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuda_graphs": 3}, "cuda_graphs is True, or the sizes to record"),
        ({"cuda_graphs": ()}, "cuda_graphs is True, or the sizes to record"),
        ({"cuda_graphs": (0, 4)}, "cuda_graphs is True, or the sizes to record"),
        ({"cuda_graphs": (True,)}, "cuda_graphs is True, or the sizes to record"),
        ({"static_inputs": ("x",)}, "static_inputs are for cuda_graphs, which is off"),
        ({"cuda_graphs": True, "static_inputs": "x"}, "static_inputs are names of inputs"),
        ({"cuda_graphs": True, "backend": Inductor({"triton.cudagraphs": True})}, "use one of the two"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Lower(**options)


def test_a_static_input_that_the_program_does_not_have_is_refused() -> None:
    with pytest.raises(
        partita.errors.PartitaError, match="static_inputs names 'ids', and the inputs of the program are"
    ):
        _lowered(_Model(), torch.randn(3, 4), torch.randn(4), cuda_graphs=True, static_inputs=("ids",))


def test_sizes_are_a_value_like_other_options() -> None:
    assert Lower("eager", cuda_graphs=[8, 2, 8]) == Lower("eager", cuda_graphs=(2, 8))
    assert hash(Lower("eager", cuda_graphs=[8, 2], static_inputs=["ids"]))
    assert repr(Lower("eager", cuda_graphs=range(1, 3))) == "Lower('eager', cuda_graphs=(1, 2))"


def test_inputs_on_the_cpu_are_a_reason() -> None:
    variant = _variant(lambda x, n, w: (x,))
    lowering = _lowered(_Model(), torch.randn(3, 4), torch.randn(4), cuda_graphs=True)[1][0].lowering
    reason = refusal(variant, lowering, static=set(), mutated=())
    assert reason is not None
    assert reason.startswith("its inputs are on cpu, not on one GPU")


@NEEDS_GPU
@torch.no_grad()
def test_a_replay_computes_what_the_model_computes() -> None:
    model = _Model().cuda()
    shift = torch.randn(4, device="cuda")
    module, (lowered,) = _lowered(model, torch.randn(3, 4, device="cuda"), shift, cuda_graphs=(3, 5))
    kept = []
    for rows in (3, 5, 7, 3, 5, 7):
        x = torch.randn(rows, 4, device="cuda")
        kept.append((module(x, shift), model(x, shift)))
        model.linear.weight.mul_(1.1)
    for found, expected in kept:
        assert torch.equal(found, expected)
    assert len(lowered._dispatcher._cuda_graphs or ()) == 2


@NEEDS_GPU
@torch.no_grad()
def test_an_expanded_input_is_copied() -> None:
    module, _ = _lowered(_as_module(lambda x: x + 1), torch.randn(1, 4, device="cuda").expand(3, 4), cuda_graphs=True)
    for _ in range(3):
        x = torch.randn(1, 4, device="cuda").expand(3, 4)
        assert torch.equal(module(x), x + 1)


def _as_module(function: Any) -> nn.Module:
    class _Function(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    return _Function()


def _variant(function: Callable[..., Any]) -> Variant:
    """A variant for a tensor with dynamic sizes, a dynamic integer, and a tensor of one size."""
    module, _ = _lowered(_as_module(lambda x: x + 1), torch.randn(3, 4), cuda_graphs=True)
    signature = _signature_of(module)
    tensor = signature.specs[0]
    specs = (tensor, Constant(int, "2"), replace(tensor, sizes=(3,), strides=(1,)))
    dimensions = (((None, None), (None, None)), None, ((3,), (1,)))
    return Variant(Fit(replace(signature, specs=specs), dimensions, frozenset({1})), function)


def _signature_of(module: nn.Module) -> Any:
    lowered = next(each for each in module.modules() if isinstance(each, Lowered))
    with torch.no_grad():
        lowered._dispatcher.make_for(
            [torch.randn(3, 4), *([torch.randn(4)] * (len(lowered._dispatcher._calls._leaves) - 1))]
        )
    return lowered._variants._functions[0].fit.signature
