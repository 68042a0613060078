"""Frames of a model inside torch.compile: regions are found by their path in the model, and plans are reported."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.lowering.helpers import Failing
from torch import Tensor, nn

from partita.errors import OptionError
from partita.policies import AroundOperators, ByModule
from partita.torch_compile import FramePlan, backend, plans
from partita.treatments import Call, LeaveEager, Lower, Recompute


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.up(x))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Wrapped(nn.Module):
    """As of data parallelism: the model is below another module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.module(x)
        return found


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _compile_whole(model: _Model, options: dict[str, Any]) -> Any:
    return torch.compile(model, backend=backend, options=options)


def _compile_with_hooks(model: _Model, options: dict[str, Any]) -> Any:
    for block in model.blocks:
        block.register_forward_pre_hook(torch.compiler.disable(lambda module, args: None))
    return torch.compile(model, backend=backend, options=options)


def _compile_blocks(model: _Model, options: dict[str, Any]) -> Any:
    for block in model.blocks:
        block.compile(backend=backend, options=options)
    return model


def _compile_wrapped(model: _Model, options: dict[str, Any]) -> Any:
    return _Wrapped(_compile_blocks(model, options))


HOW = [_compile_whole, _compile_with_hooks, _compile_blocks]


@pytest.mark.parametrize("compiled", HOW)
@pytest.mark.parametrize("policy", [ByModule("blocks.*"), ByModule("blocks.*", classes=_Block)], ids=["path", "class"])
def test_a_block_is_found_by_its_path_in_the_model(compiled: Any, policy: ByModule) -> None:
    model, seen = _Model(), list[FramePlan]()
    options = {"policy": policy, "treatment": Recompute(), "inner": "aot_eager", "on_plan": seen.append}
    x = torch.randn(4, 8, requires_grad=True)
    found = compiled(model, options)(x)
    assert torch.allclose(found, model(x))
    found.sum().backward()
    assert seen
    assert all(len(frame.plan.partition) for frame in seen)
    assert {region.label for frame in seen for region in frame.plan.partition} <= {"blocks.0", "blocks.1"}
    assert plans(model) == tuple(seen)


def test_a_path_below_a_wrapper_is_found_too() -> None:
    model, seen = _Model(), list[FramePlan]()
    wrapped = _Wrapped(
        _compile_blocks(model, {"policy": ByModule("blocks.*"), "inner": "eager", "on_plan": seen.append})
    )
    wrapped(torch.randn(4, 8))
    assert {len(frame.plan.partition) for frame in seen} == {1}
    assert [frame.path for frame in seen] == ["module.blocks.0", "module.blocks.1"][: len(seen)]
    assert plans(wrapped) == tuple(seen)


def test_a_pattern_may_be_relative_to_the_frame() -> None:
    model, seen = _Model(), list[FramePlan]()
    _compile_blocks(model, {"policy": ByModule("up"), "inner": "eager", "on_plan": seen.append})(torch.randn(4, 8))
    assert {region.label for frame in seen for region in frame.plan.partition} == {"up"}


def test_a_report_says_where_how_long_and_how_many_bodies() -> None:
    model = _Model()
    torch.compile(model, backend=backend, options={"policy": ByModule("blocks.*"), "inner": "eager"})(torch.randn(4, 8))
    (frame,) = plans(model)
    assert (frame.path, len(frame.plan.partition), frame.bodies) == ("", 2, 1)
    assert frame.seconds > 0
    assert not frame.plan.failures
    assert repr(frame).startswith("FramePlan(the model: 6 operators, 2 regions, 1 body, ")
    assert plans(nn.Linear(2, 2)) == ()


def test_plans_of_a_compiled_module_are_those_of_the_model() -> None:
    model = _Model()
    compiled = torch.compile(model, backend=backend, options={"inner": "eager"})
    compiled(torch.randn(4, 8))
    assert plans(compiled) == plans(model) != ()


def test_what_lower_compiles_is_in_the_report_of_its_frame() -> None:
    model, lower = _Model(), Lower("eager", dynamic=False)
    compiled = torch.compile(model, backend=backend, options={"policy": ByModule("blocks.*"), "treatment": lower})
    with torch.no_grad():
        compiled(torch.randn(4, 8))
    (frame,) = plans(model)
    first, second = frame.plan.compilations
    assert (first.region, first.shared_with) == ("blocks_0", None)
    assert (second.region, second.shared_with) == ("blocks_1", "blocks_0")
    assert frame.bodies == 1
    assert frame.seconds == frame.inner_seconds + first.seconds > frame.inner_seconds


def test_failures_of_lower_are_in_the_plan_of_the_frame() -> None:
    model, lower = _Model(), Lower(Failing())
    torch.compile(model, backend=backend, options={"treatment": lower})(torch.randn(4, 8))
    (frame,) = plans(model)
    assert [failure.backend for failure in frame.plan.failures] == ["failing"]
    assert frame.bodies == 0


def test_a_reset_of_the_compiler_forgets_the_plans() -> None:
    model = _Model()
    compiled = torch.compile(model, backend=backend, options={"inner": "eager"})
    for _ in range(2):  # Dynamo itself knows the backend of a function only until the first reset.
        compiled(torch.randn(4, 8))
        assert len(plans(model)) == 1
        torch.compiler.reset()
        assert plans(model) == ()


def test_a_model_without_any_match_is_a_warning_at_the_second_call(caplog: pytest.LogCaptureFixture) -> None:
    model = _Model()
    compiled = _compile_with_hooks(model, {"policy": ByModule("layers.*"), "treatment": Recompute(), "inner": "eager"})
    with caplog.at_level(logging.WARNING, "partita"):
        compiled(torch.randn(4, 8))
        assert not caplog.messages
        for _ in range(3):
            compiled(torch.randn(4, 8))
    warnings = [message for message in caplog.messages if "matches nothing" in message]
    assert len(warnings) == 1
    assert "ByModule(paths=('layers.*',)" in warnings[0]


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        (ByModule("block.*"), "did you mean '_Block', 'blocks.0', 'blocks.1'?"),
        (AroundOperators("linar"), "did you mean 'aten.linear'?"),
        (AroundOperators("softmax"), "operators called in it: 'aten.linear', 'aten.relu'"),
    ],
    ids=["module", "operator", "no such operator"],
)
def test_the_warning_shows_near_matches(policy: Any, hint: str, caplog: pytest.LogCaptureFixture) -> None:
    model = _Model()
    compiled = torch.compile(model, backend=backend, options={"policy": policy, "inner": "eager"})
    with caplog.at_level(logging.WARNING, "partita"):
        for _ in range(2):
            compiled(torch.randn(4, 8))
    (warning,) = _warnings(caplog)
    assert "matches nothing" in warning
    assert hint in warning


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("partita")]


@pytest.mark.parametrize("policy", [ByModule("x", allow_empty=True), AroundOperators("aten.mm", allow_empty=True)])
def test_who_allows_no_match_gets_no_warning(policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(_Model(), backend=backend, options={"policy": policy, "inner": "eager"})
    for _ in range(3):
        compiled(torch.randn(4, 8))
    assert not _warnings(caplog)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("blocks.0", "'blocks.1' is treated like 'blocks.0': Dynamo compiles equal modules once"),
        ("blocks.1", "'blocks.1' is left untreated like 'blocks.0': Dynamo compiles equal modules once"),
        ("blocks.1.up", "'blocks.1' is left untreated like 'blocks.0'"),
        ("blocks.*", None),
        ("*.up", None),
    ],
)
@pytest.mark.parametrize(
    "compiled", [_compile_with_hooks, pytest.param(_compile_blocks, marks=pytest.mark.slow), _compile_wrapped]
)
def test_a_pattern_for_one_of_equal_layers_says_that_it_treats_all_or_none(
    compiled: Any, pattern: str, message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    called = compiled(_Model(), {"policy": ByModule(pattern), "inner": "eager"})
    with torch.no_grad():
        for _ in range(3):
            called(torch.randn(4, 8))
    found = _warnings(caplog)
    assert len(found) == (message is not None)
    assert message is None or message in found[0].replace("module.", "")


class _TwoKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return x.sin()


def test_a_frame_without_a_match_is_fine_if_another_has_one(caplog: pytest.LogCaptureFixture) -> None:
    model = _TwoKinds()
    compiled = torch.compile(model, backend=backend, options={"policy": ByModule("blocks.*"), "inner": "eager"})
    with caplog.at_level(logging.WARNING, "partita"):
        for _ in range(3):
            compiled(torch.randn(4, 8))
    assert sorted(len(frame.plan.partition) for frame in plans(model)) == [0, 1]
    assert not [message for message in caplog.messages if "matches nothing" in message]


def test_the_policy_is_called_once_for_a_graph() -> None:
    calls = []

    def policy(program: Any) -> Any:
        calls.append(program)
        return ByModule("blocks.*")(program)

    model = _Model()
    torch.compile(model, backend=backend, options={"policy": policy, "inner": "aot_eager"})(torch.randn(4, 8))
    assert len(calls) == 1


def test_on_plan_is_a_function() -> None:
    with pytest.raises(Exception, match="'on_plan' takes a function") as raised:
        torch.compile(_Model(), backend=backend, options={"on_plan": 3})(torch.randn(4, 8))
    assert OptionError.__name__ in str(raised.value)


def test_a_region_can_be_left_to_python() -> None:
    compiled_bodies = []

    def count(body: Any, inputs: Any) -> Any:
        compiled_bodies.append(body)
        return body.forward

    def treatment(region: Any) -> Any:
        return LeaveEager() if region.label == "blocks.0" else Call()

    model, x = _Model(), torch.randn(4, 8, requires_grad=True)
    options = {"policy": ByModule("blocks.*"), "treatment": treatment, "inner": count}
    found = torch.compile(model, backend=backend, options=options)(x)
    assert torch.equal(found, model(x))
    assert len(compiled_bodies) == 1
    found.sum().backward()


def test_the_plan_of_a_frame_counts_under_the_autocast_that_it_was_compiled_under() -> None:
    model = _Model()
    compiled = torch.compile(model, backend=backend, options={"treatment": Recompute(), "inner": "aot_eager"})
    with torch.autocast("cpu", torch.bfloat16):
        compiled(torch.randn(4, 8))
    (frame,) = plans(model)
    found = frame.plan.saved_memory()
    assert "called under: enable_grad, autocast on cpu bfloat16" in str(frame.plan)
    # Of each block a cast of the input, and the result of relu; of the second a cast of the weight.
    assert found.total is not None
    assert found.total.plain_bytes == 2 * (64 + 64) + 128
    without = frame.plan.saved_memory(under=torch.autocast("cpu", enabled=False))
    assert "called under: enable_grad, no autocast on cpu" in str(without)
    assert without.total is not None
    assert without.total.plain_bytes == 2 * (128 + 128)
