"""Capturing a model keeps every mode block that its author wrote, and nothing of whoever captures it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tests.capture.helpers import Model, assert_like_eager
from tests.helpers.selecting import slow_but
from tests.helpers.torch_versions import IS_OLD
from torch import Tensor

from partita import Program, fingerprint, plan, verify
from partita._torch import toggles
from partita.capture._torch.recorder import Constants
from partita.capture.capture import capture, capture_joint
from partita.policies import BySize
from partita.treatments import Call

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))


def no_grad_in_autocast(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.first(x)
        with torch.no_grad():
            scale = model.second(x)
        return hidden * scale


def autocast_in_no_grad_in_enable_grad(model: Model, x: Tensor) -> Tensor:
    with torch.enable_grad():
        hidden = model.first(x)
        with torch.no_grad():
            scale = model.second(hidden)
            with torch.autocast("cpu"):
                scale = scale @ model.second.weight
        return hidden * scale


def grad_mode_as_a_function(model: Model, x: Tensor) -> Tensor:
    hidden = model.first(x)
    torch.set_grad_enabled(False)
    scale = model.second(x)
    torch.set_grad_enabled(True)
    return hidden * scale + model.second(hidden)


def grad_mode_left_off(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = model.first(x)
    torch._C._set_grad_enabled(False)
    return hidden, model.second(hidden)


@torch.no_grad()
def _frozen(model: Model, x: Tensor) -> Tensor:
    return model.second(x)


def decorated_part(model: Model, x: Tensor) -> Tensor:
    return model.first(x) * _frozen(model, x)


@torch.no_grad()
def decorated_whole(model: Model, x: Tensor) -> Tensor:
    return model.second(model.first(x))


@torch.no_grad
def decorated_without_parentheses(model: Model, x: Tensor) -> Tensor:
    return model.second(model.first(x))


@torch.enable_grad()
def always_with_gradients(model: Model, x: Tensor) -> Tensor:
    return model.second(model.first(x))


def enable_grad_block_at_top_level(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        tracked = model.first(x)
    return tracked, model.second(x)


def inference_block(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        fixed = model.second(x)
    return fixed, model.first(x)


@torch.inference_mode()
def inference_whole(model: Model, x: Tensor) -> Tensor:
    return model.second(model.first(x))


def inference_switched_off(model: Model, x: Tensor) -> Tensor:
    with torch.inference_mode(mode=False):
        return model.first(x)


def inference_and_others(model: Model, x: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.inference_mode():
            first = model.first(x)
        second = model.second(x)
    with torch.inference_mode():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            third = model.first(x)
        with torch.enable_grad():
            fourth = model.second(x)
    return first, second, third, fourth


def writing_under_no_grad(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.total.add_(x.sum(0))
        model.total.mul_(0.5)
    return model.first(x) * model.total


def only_writing_under_no_grad(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.total.copy_(x.sum(0))
    return model.first(x)


def leaving_by_exception(model: Model, x: Tensor) -> Tensor:
    hidden = model.first(x)
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = hidden + model.second(x)
            raise ValueError
    except ValueError:
        return hidden * model.second(hidden)


def leaving_by_return(model: Model, x: Tensor) -> Tensor:
    def scale() -> Tensor:
        for layer in (model.first, model.second):
            with torch.no_grad():
                if layer is model.second:
                    return layer(x)
                x.sin()
        return x

    return model.first(x) * scale()


@torch.no_grad()
def _numbers(model: Model, x: Tensor) -> Iterator[Tensor]:
    yield model.first(x)
    yield model.second(x)


def decorated_generator(model: Model, x: Tensor) -> Tensor:
    hidden = model.first(x)
    for number in _numbers(model, x):
        hidden = model.second(hidden) * number
    return hidden


def _under_no_grad(model: Model, x: Tensor) -> Iterator[Tensor]:
    with torch.no_grad():
        yield model.first(x)
    yield model.second(x)


def generator_with_a_block_inside(model: Model, x: Tensor) -> Tensor:
    hidden = x
    for number in _under_no_grad(model, x):  # The block is open in here the first time.
        hidden = model.first(hidden) * number
    return hidden


def loop(model: Model, x: Tensor) -> Tensor:
    for step in range(4):
        with torch.set_grad_enabled(step % 2 == 1):
            x = model.first(x)
        x = model.second(x)
    return x


@contextmanager
def _mixed() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        yield


def blocks_of_a_contextmanager(model: Model, x: Tensor) -> Tensor:
    with _mixed():
        scale = model.second(x)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        shift = model.second(x)
    return model.first(x) * scale + shift


def block_as_a_value(model: Model, x: Tensor) -> Tensor:
    block = torch.no_grad()
    with block:
        scale = model.second(x)
    hidden = model.first(x)
    with block:
        return hidden + model.first(scale)


def entered_by_hand(model: Model, x: Tensor) -> Tensor:
    block = torch.set_grad_enabled(False)
    block.__enter__()
    scale = model.second(x)
    block.__exit__(None, None, None)
    return model.first(x) * scale


def decorator_made_inside(model: Model, x: Tensor) -> Tensor:
    scale = torch.set_grad_enabled(False)(model.second)
    hidden = model.first(x)
    return hidden * scale(hidden)


def autocast_off_inside(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.first(x)
        with torch.autocast("cpu", enabled=False):
            hidden = model.second(hidden.float())
        return model.first(hidden)


def autocast_with_other_arguments(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        hidden = model.first(x)
        with torch.amp.autocast(device_type="cpu", enabled=True):
            return model.first(hidden) + model.first(hidden)


@torch.autocast("cpu", dtype=torch.bfloat16)
def autocast_decorator(model: Model, x: Tensor) -> Tensor:
    return model.second(model.first(x))


def autocast_made_elsewhere(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        inner = torch.autocast("cpu")
    with inner:
        return model.first(x)


def autocast_on_several_devices(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cuda"), torch.autocast("cpu"), torch.autocast("xpu", dtype=torch.bfloat16):
        return model.first(x)


def left_in_the_order_of_entering(model: Model, x: Tensor) -> Tensor:
    outer, inner = torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad()
    outer.__enter__()
    inner.__enter__()
    hidden = model.first(x)
    outer.__exit__(None, None, None)
    hidden = model.second(hidden.float())
    inner.__exit__(None, None, None)
    return model.second(hidden) + model.first(x)


def putting_the_callers_mode_back(model: Model, x: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    scale = model.second(x)
    torch.set_grad_enabled(before)
    return model.first(x) * scale


def as_the_caller_says(model: Model, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(torch.is_grad_enabled() and model.training):
        return model.first(x)


def without_the_callers_autocast(model: Model, x: Tensor) -> Tensor:
    hidden = model.first(x)
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
        return model.second(hidden.float()) @ model.first.weight


def asking_inside_blocks(model: Model, x: Tensor) -> Tensor:
    with torch.inference_mode(), torch.no_grad():
        model.total.add_(int(torch.is_inference_mode_enabled()) + 10 * int(torch.is_grad_enabled()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.first(x) * int(torch.is_autocast_enabled("cpu"))


def branches(model: Model, x: Tensor) -> Tensor:
    def positive(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.sin()
        return scale * x

    def negative(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = x @ x.sin().T
        return x + product.sum().float()

    hidden = model.first(x)
    return torch.cond(hidden.sum() > 0, positive, negative, (hidden,)) + torch.cond(
        hidden.sum() < 0, positive, negative, (x + 1,)
    )


def a_block_that_was_made_before(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        with _MADE_BEFORE:
            hidden = model.first(x)
        return hidden, model.second(x)  # It has put back what was on when it was made, not what is off around it.


_MADE_BEFORE = torch.set_grad_enabled(True)


def inference_left_open(model: Model, x: Tensor) -> Tensor:
    block = torch.inference_mode()
    block.__enter__()  # It ends with the function, when nothing refers to it any more.
    return model.first(x)


def toggles_called_directly(model: Model, x: Tensor) -> Tensor:
    handle = torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, None)
    hidden = model.first(x)
    torch.amp.autocast_mode._exit_autocast(handle)
    mode = torch.autograd.grad_mode._enter_inference_mode(True)
    model.second(x)
    torch.autograd.grad_mode._exit_inference_mode(mode)
    return model.second(hidden.float())


MODELS: list[Callable[..., Any]] = [
    no_grad_in_autocast,
    autocast_in_no_grad_in_enable_grad,
    grad_mode_as_a_function,
    grad_mode_left_off,
    decorated_part,
    decorated_whole,
    decorated_without_parentheses,
    always_with_gradients,
    enable_grad_block_at_top_level,
    inference_whole,
    inference_switched_off,
    writing_under_no_grad,
    only_writing_under_no_grad,
    leaving_by_exception,
    leaving_by_return,
    decorated_generator,
    generator_with_a_block_inside,
    loop,
    blocks_of_a_contextmanager,
    block_as_a_value,
    entered_by_hand,
    decorator_made_inside,
    autocast_off_inside,
    autocast_with_other_arguments,
    autocast_decorator,
    autocast_made_elsewhere,
    autocast_on_several_devices,
    left_in_the_order_of_entering,
    putting_the_callers_mode_back,
    as_the_caller_says,
    without_the_callers_autocast,
    asking_inside_blocks,
    branches,
    inference_block,
    inference_and_others,
    a_block_that_was_made_before,
    inference_left_open,
    toggles_called_directly,
]


@pytest.mark.filterwarnings("ignore:.*Disabling autocast", "ignore:.*autocast.*not available")
@pytest.mark.parametrize("does", MODELS, ids=lambda does: does.__name__)
def test_a_captured_model_does_what_it_does_in_eager_mode(does: Callable[..., Any]) -> None:
    assert_like_eager(Model(does), (X,))


@pytest.mark.filterwarnings("ignore:.*Disabling autocast", "ignore:.*autocast.*not available")
@pytest.mark.parametrize("does", slow_but(MODELS, *MODELS[::3]), ids=lambda does: does.__name__)
def test_the_modes_of_whoever_captures_make_no_difference(does: Callable[..., Any]) -> None:
    model = Model(does)
    expected = fingerprint(capture(model, (X,)))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
        assert fingerprint(capture(model, (X,))) == expected


@pytest.mark.filterwarnings("ignore:.*Disabling autocast", "ignore:.*autocast.*not available")
@pytest.mark.parametrize(
    "does", slow_but(MODELS, autocast_in_no_grad_in_enable_grad, as_the_caller_says), ids=lambda does: does.__name__
)
def test_each_mode_of_whoever_captures_makes_no_difference(does: Callable[..., Any]) -> None:
    model = Model(does)
    expected = fingerprint(capture(model, (X,)))
    for ambient in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16)):
        with ambient:
            assert fingerprint(capture(model, (X,))) == expected


def modes_of_operators(program: Program) -> list[str]:
    operators = [node for node in program.operators() if program.index.number[node] not in program.modes.toggles]
    return [f"{node.name}: {program.modes.at(program.index.number[node])}" for node in operators]


def test_the_program_tells_the_modes_that_were_written() -> None:
    assert modes_of_operators(capture(Model(autocast_in_no_grad_in_enable_grad), (X,))) == [
        "linear: enable_grad",
        "linear_1: no_grad",
        "matmul: no_grad, autocast on cpu",
        "mul: enable_grad",
    ]
    assert modes_of_operators(capture(Model(putting_the_callers_mode_back), (X,))) == [
        "linear: no_grad",
        "linear_1: the caller's modes",
        "mul: the caller's modes",
    ]
    assert modes_of_operators(capture(Model(grad_mode_as_a_function), (X,))) == [
        "linear: the caller's modes",
        "linear_1: no_grad",
        "mul: enable_grad",
        "linear_2: enable_grad",
        "add: enable_grad",
    ]


def test_autocast_blocks_have_the_arguments_that_were_given() -> None:
    def entered(does: Callable[..., Any]) -> list[tuple[Any, ...]]:
        nodes = capture(Model(does), (X,)).graph.find_nodes(op="call_function", target=toggles.ENTER_AUTOCAST)
        return [node.args for node in nodes]

    assert entered(no_grad_in_autocast) == [("cpu", torch.bfloat16, True, None)]
    assert entered(autocast_off_inside) == [("cpu", torch.bfloat16, True, None), ("cpu", None, False, None)]
    assert entered(autocast_with_other_arguments)[0] == ("cpu", torch.float16, True, False)
    assert entered(autocast_decorator) == [("cpu", torch.bfloat16, True, True)]  # Made when autocast's cache was on.
    assert entered(autocast_made_elsewhere) == [("cpu", torch.float16, True, None)]


def test_the_device_of_an_autocast_block_may_have_an_index() -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        with torch.autocast("cpu:0", dtype=torch.float16):
            hidden = model.first(x)
            with torch.autocast("cpu:0", enabled=False):
                return model.second(hidden.float())

    program = assert_like_eager(Model(does), (X,))
    nodes = program.graph.find_nodes(op="call_function", target=toggles.ENTER_AUTOCAST)
    assert [node.args[:3] for node in nodes] == [("cpu", torch.float16, True), ("cpu", None, False)]


def test_gradients_switched_on_in_an_inference_block_can_be_captured_again() -> None:
    def does(model: Model, x: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            inside = model.first(x)
            with torch.inference_mode(False):
                outside = model.first(x)
            with torch.enable_grad():
                return inside, outside, model.second(x)

    program = capture(Model(does), (X,))
    again = capture(program.module(), (X,))
    assert fingerprint(again) == fingerprint(program)
    assert modes_of_operators(again) == modes_of_operators(program)


class Tables(Model):
    """Has tensors that are not in its state."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__(does)
        self.read, self.written = torch.ones(4), [torch.ones(4), torch.ones(4), torch.ones(4)]


def writing_to_constants(model: Tables, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.written[0].add_(1)
        model.written[1].split(2)[1].view(1, 2).mul_(3)
        torch.add(x[0], 1, out=model.written[2])
    return model.first(x) * model.read[:4] + sum(model.written)


def test_constants_are_as_before_and_only_what_is_written_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Constants] = []
    restore = Constants.restore

    def restored(constants: Constants) -> None:
        met.append(constants)
        restore(constants)

    monkeypatch.setattr(Constants, "restore", restored)
    model = Tables(writing_to_constants)
    capture(model, (X,))
    assert all(torch.equal(tensor, torch.ones(4)) for tensor in (model.read, *model.written))
    (constants,) = met
    is_copied = {id(found.tensor): found.before is not None for found in constants.found.values()}
    assert is_copied == {id(model.read): False} | {id(tensor): True for tensor in model.written}


def vmapped(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.vmap(lambda row: model.first(row).norm())(x)


def pushed_forward(model: Model, x: Tensor) -> Any:
    with torch.no_grad():
        return torch.func.jvp(lambda value: model.first(value).sin(), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize(
    "does",
    [
        vmapped,
        pytest.param(pushed_forward, marks=pytest.mark.skipif(IS_OLD, reason="torch 2.11 cannot trace jvp")),
    ],
)
def test_functorch_levels_inside_a_block_can_be_captured_again(does: Callable[..., Any]) -> None:
    model = Model(does)
    again = capture(capture(model, (X,)).module(), (X,))
    verify(model, again, (X,))
    assert again.exported()


@pytest.mark.parametrize("is_parameter", [False, True])
def test_one_tensor_passed_twice_is_two_inputs(is_parameter: bool) -> None:
    """torch.export merges them (2.13): its program ignores the first one afterwards."""

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, p: Tensor, rest: dict[str, Tensor]) -> Tensor:
            return p * 2 + rest["q"] * self.weight

    model, one = Sum(), torch.ones(3, requires_grad=True)
    args = (model.weight, {"q": model.weight}) if is_parameter else (one, {"q": one})
    p, q = torch.arange(3.0, requires_grad=True), torch.full((3,), 10.0)
    result = capture(model, args).module()(p, {"q": q})
    assert torch.equal(result, model(p, {"q": q}))
    assert torch.equal(torch.autograd.grad(result.sum(), p)[0], torch.full((3,), 2.0))


class _Counting(torch.nn.Module):
    """Counts its calls with `+=`, which mutates the buffer and assigns it again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) / self.calls


def test_a_buffer_that_is_assigned_after_an_in_place_mutation_is_mutated_once() -> None:
    model, x = _Counting(), torch.randn(2, 4)
    program = capture(model, (x,))
    assert not program.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    verify(model, program, (x,))
    program.module()(x).sum().backward()  # torch.export's own refuses this backward (2.13).
    assert model.calls == 1


def test_a_buffer_that_is_replaced_gets_the_new_value() -> None:
    class Replacing(_Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls * 2 + 1
            return self.layer(x) / self.calls

    model, x = Replacing(), torch.randn(2, 4)
    program = capture(model, (x,))
    program.module()(x)
    program.module()(x)
    assert dict(program.module().named_buffers())["calls"] == 3


def test_a_warning_says_that_a_model_distinguishes_arguments_that_are_one_tensor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def doubled_if_one(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 if x is y else x + y * 3

    def added(x: Tensor, y: Tensor) -> Tensor:
        return x + y * 3

    program = capture(doubled_if_one, (X, X))
    assert any("one tensor" in message for message in caplog.messages)
    verify(doubled_if_one, program, (X, X + 1))
    caplog.clear()
    verify(added, capture(added, (X, X)), (X, X))
    verify(doubled_if_one, capture(doubled_if_one, (X, X + 1)), (X, X + 1))
    assert not caplog.messages


def test_the_warning_about_one_tensor_is_that_of_joint_graphs_too(caplog: pytest.LogCaptureFixture) -> None:
    layer = torch.nn.Linear(4, 4)
    capture_joint(lambda x, y: layer(x) if x is y else layer(x) + y, (X, X))
    assert sum("one tensor" in message for message in caplog.messages) == 1


def test_a_parameter_as_an_argument_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    layer = torch.nn.Linear(4, 4)
    verify(layer, capture(layer, (layer.weight,)), (torch.ones(4, 4),))
    assert not caplog.messages


class Noisy(torch.nn.Module):
    """Uses generators that are arguments, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.own = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor, first: Any, *, second: Any) -> Tensor:
        with torch.no_grad():
            noise = torch.randn(3, 4, generator=first)
        chosen = torch.randperm(4, generator=second["order"])
        return (self.layer(x) + noise)[:, chosen] * torch.rand(3, 4, generator=self.own)


def _generators(*seeds: int) -> tuple[torch.Generator, ...]:
    return tuple(torch.Generator().manual_seed(seed) for seed in seeds)


@pytest.mark.skipif(IS_OLD, reason="torch 2.11 exports no model with a generator as argument")
@pytest.mark.parametrize("passes", ["two generators", "one generator twice", "the model's own"])
def test_generators_that_are_passed_are_used_and_advance(passes: str) -> None:
    model = Noisy()
    first, second = _generators(2, 3)
    if passes == "one generator twice":
        second = first
    if passes == "the model's own":
        first = model.own
    program = capture(model, (X, first), {"second": {"order": second}})
    cut = plan(program, BySize(parts=3), Call()).apply()
    for after in (program, cut):
        first, second = _generators(5, 6)
        verify(model, after, (X, first), {"second": {"order": second}})
        state = model.own.get_state()
        expected = model(X, first, second={"order": second})
        model.own.set_state(state)
        other_first, other_second = _generators(5, 6)
        assert torch.equal(after.module()(X, other_first, second={"order": other_second}), expected)
        assert torch.equal(other_first.get_state(), first.get_state())
        assert torch.equal(other_second.get_state(), second.get_state())


@pytest.mark.skipif(IS_OLD, reason="torch 2.11 exports no model with a generator as argument")
def test_a_generator_may_be_omitted_in_a_later_call() -> None:
    def noisy(x: Tensor, generator: torch.Generator | None) -> Tensor:
        return x + torch.randn(3, 4, generator=generator)

    verify(noisy, capture(noisy, (X, torch.Generator())), (X, None))
