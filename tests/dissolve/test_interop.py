"""Dissolved programs in onnxruntime, through ONNX, and in OpenVINO: really run, and compared with eager torch."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from tests.helpers.selecting import slow_but
from torch import Tensor, nn
from torch.nn import functional

from partita import Program, capture, dissolve

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

HALF, BRAIN = torch.float16, torch.bfloat16

#: Eager torch adds up in another order than the runtimes do: a few units in the last place of the lower precision, for
#: values around 1.
TOLERANCE = {torch.float32: 1e-5, HALF: 4e-3, BRAIN: 3e-2}


class Attention(nn.Module):
    """Every kind of block: no_grad, autocast, no_grad inside autocast, autocast switched off inside autocast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtype = dtype
        self.into, self.norm, self.out = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.register_buffer("least", torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            scale = x.abs().amax(-1, keepdim=True) + self.least
        with torch.autocast("cpu", self.dtype):
            h = functional.gelu(self.norm(self.into(x / scale).float()))
            with torch.no_grad():
                gate = torch.softmax(h @ self.out.weight.t(), -1)
            q = (h @ self.into.weight)[None, None]
            a = functional.scaled_dot_product_attention(q, q, q)[0, 0]
            with torch.autocast("cpu", enabled=False):
                b = self.out(functional.pad(a.float(), (0, 8)))
            c = self.conv(b[:, None])[:, 0]
        return c.float() * scale, gate.float()


class Counting(nn.Module):
    """A buffer that is updated under no_grad, and read afterwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        y = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * y.mean(0))
        with torch.autocast("cpu", HALF):
            return (self.layer(y - self.mean).float(),)


class Branching(nn.Module):
    """Blocks inside the branches of a condition, and around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        def positive(x: Tensor) -> Tensor:
            with torch.no_grad():
                y = x @ self.w
            return y * x

        def negative(x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return x @ self.w

        with torch.autocast("cpu", HALF):
            return (torch.cond(x.sum() > 0, positive, negative, (x,)),)


class Contracting(nn.Module):
    """An operator that autocast casts inside, where no exporter sees it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        with torch.autocast("cpu", HALF):
            return (torch.einsum("ij,kj->ik", x, self.w).float(),)


def example() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 8)


def dissolved(model: nn.Module) -> Any:
    return dissolve(capture(copy.deepcopy(model), (example(),))).exported()


def in_onnx(exported: Any) -> Any:
    """The ONNX model of an exported program."""
    with _quiet():
        return torch.onnx.export(exported, dynamo=True, verbose=False).model_proto


def in_onnxruntime(exported: Any, x: Tensor) -> list[Tensor]:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(in_onnx(exported).SerializeToString(), providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    return [torch.from_numpy(output) for output in session.run(None, {taken.name: x.numpy()})]


def in_openvino(exported: Any, x: Tensor) -> list[Tensor]:
    openvino = pytest.importorskip("openvino")
    compiled = openvino.compile_model(openvino.convert_model(exported), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return [torch.from_numpy(output) for output in compiled(x.numpy()).values()]


def assert_near(found: list[Tensor], model: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    wanted = [output.detach() for output in copy.deepcopy(model)(x)]
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


class _quiet:  # noqa: N801
    """Without the exporter's warnings on what is not installed."""

    def __enter__(self) -> None:
        logging.disable(logging.WARNING)

    def __exit__(self, *error: object) -> None:
        logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO reports conversions to its makers, unless it finds itself in continuous integration."""
    monkeypatch.setenv("CI", "true")


def test_attention_runs_in_onnxruntime() -> None:
    model = Attention(HALF)
    exported = dissolved(model)
    assert_near(in_onnxruntime(exported, example()), model, example(), HALF)
    assert "Cast" in {node.op_type for node in in_onnx(exported).graph.node}


@pytest.mark.parametrize("dtype", slow_but([HALF, BRAIN], BRAIN))
def test_attention_runs_in_openvino(dtype: torch.dtype) -> None:
    assert_near(in_openvino(dissolved(Attention(dtype)), example()), Attention(dtype), example(), dtype)


@pytest.mark.parametrize("run", [in_onnxruntime, in_openvino])
def test_a_buffer_is_updated_before_it_is_read(run: Any) -> None:
    assert_near(run(dissolved(Counting()), example()), Counting(), example(), HALF)


@pytest.mark.parametrize(
    ("run", "sign"),
    [
        (in_onnxruntime, 1),
        (in_openvino, -1),
        pytest.param(in_onnxruntime, -1, marks=pytest.mark.slow),
        pytest.param(in_openvino, 1, marks=pytest.mark.slow),
    ],
)
def test_both_branches_run(run: Any, sign: int) -> None:
    x = example().abs() * sign
    assert_near(run(dissolved(Branching()), x), Branching(), x, HALF)


@pytest.mark.parametrize("run", [in_onnxruntime, in_openvino])
def test_an_operator_that_casts_inside_runs(run: Any) -> None:
    assert_near(run(dissolved(Contracting()), example()), Contracting(), example(), HALF)


def test_without_dissolving_what_torch_exports_is_not_converted() -> None:
    exported = torch.export.export(Contracting(), (example(),))
    with pytest.raises(Exception, match="dtype mismatch"):
        in_onnx(exported)
    with pytest.raises(AssertionError, match="dtype mismatch"):
        in_openvino(exported, example())
    in_onnx(dissolve(Program.of(torch.export.export(Contracting(), (example(),)))).exported())


def test_a_training_step_of_a_converted_program_has_the_gradients_of_eager_torch() -> None:
    model = Attention(BRAIN)
    module = dissolve(capture(copy.deepcopy(model), (example(),))).module()
    for each in (model, module):
        sum(output.square().sum() for output in each(example())).backward()
    gradients = {name: weight.grad for name, weight in module.named_parameters()}
    torch.testing.assert_close(gradients, {name: w.grad for name, w in model.named_parameters()}, rtol=0, atol=0)
