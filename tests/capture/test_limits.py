"""What cannot be captured is refused in words; whatever happens, torch is as it was, and other threads never notice."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any

import pytest
import torch
from tests.capture.helpers import Model, captured, same
from tests.helpers.torch_versions import IS_OLD
from torch import Tensor, nn
from torch import is_autocast_enabled as asks_for_autocast

from partita._torch import toggles
from partita._torch.modes import read_ambient
from partita.capture._torch.recorded_export import _all_patches
from partita.capture._torch.recorder import Recorder
from partita.capture.capture import capture
from partita.errors import CaptureError, ModeError, OptionError, PartitaError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
OUTSIDE = nn.Parameter(torch.ones(4))


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 7 * gradient


def branching_on_values(model: Model, x: Tensor) -> Tensor:
    return model.first(x) if x.sum() > 0 else x


def failing(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"):
        raise LookupError("no such layer\nand more")


def with_its_own_backward(model: Model, x: Tensor) -> Tensor:
    return Cubed.apply(model.first(x))


def going_backward(model: Model, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model.first(x).sum(), x)[0]


def autocast_by_function(model: Model, x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", True)
    hidden = model.first(x)
    torch.set_autocast_enabled("cpu", False)
    return hidden


def the_opposite_of_the_caller(model: Model, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        return model.first(x)


def with_a_parameter_from_outside(model: Model, x: Tensor) -> Tensor:
    return model.first(x) * OUTSIDE


def with_the_callers_dtype_inside_another(model: Model, x: Tensor) -> Tensor:
    inner = torch.autocast("cpu")
    with torch.autocast("cpu", dtype=torch.float16), inner:
        return model.first(x)


def crossing_blocks(model: Model, x: Tensor) -> Tensor:
    with torch.inference_mode():
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
        model.first(x)
    return model.second(x)


def writing_data(model: Model, x: Tensor) -> Tensor:
    model.first.weight.data.clamp_(-1, 1)
    return model.first(x)


def mapping_to_another_axis(model: Model, x: Tensor) -> Tensor:
    return torch.vmap(torch.sin, out_dims=1)(model.first.weight) + x.sum()


def going_backward_by_a_transform(model: Model, x: Tensor) -> Tensor:
    _, gradient = torch.func.vjp(model.first, x)
    return gradient(model.first(x))[0]  # type: ignore[no-any-return]


class Cache:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def returning_its_own_class(model: Model, x: Tensor) -> Cache:
    return Cache(model.first(x))


def random_from_a_lower_bound(model: Model, x: Tensor) -> Tensor:
    return x + torch.empty_like(x).random_(3, 9)


KEPT_ALIVE: list[Iterator[Tensor]] = []


REFUSED: dict[Callable[..., Any], str] = {
    random_from_a_lower_bound: r"aten.random_.from, since 'from' is a keyword.*torch.randint_like\(x, low, high\)",
    returning_its_own_class: r"it returns a .*Cache, .*returns tensors.*config\.use_cache = False",
    branching_on_values: "Model cannot be captured: .*[Dd]ata-dependent",
    failing: "Model cannot be captured: LookupError: no such layer$",
    with_its_own_backward: r"node 'pow_1'.* ran without gradients.*torch.autograd.Function.*custom_op",
    going_backward: "ran without gradients.*backward pass",
    autocast_by_function: "node 'linear'.* autocast on cpu bfloat16.*context managers",
    the_opposite_of_the_caller: "off where its caller has them on.*constant",
    with_a_parameter_from_outside: "neither an argument nor in its state.*register it",
    with_the_callers_dtype_inside_another: "takes its dtype from the caller",
    crossing_blocks: "'_enter_autocast' crosses the inference block",
    writing_data: r"no trace can follow\. `\.data` does: mutate under torch\.no_grad\(\)",
    mapping_to_another_axis: r"torch\.vmap with `out_dims` other than 0: leave that at 0.*movedim",
    going_backward_by_a_transform: "it runs a gradient transform such as torch.func.grad",
}


@pytest.mark.parametrize("does", REFUSED, ids=lambda does: does.__name__)
def test_what_cannot_be_kept_is_refused(does: Callable[..., Any]) -> None:
    found, before = read_ambient(), held_by_torch()
    with pytest.raises(PartitaError, match=REFUSED[does]) as caught:
        captured(Model(does), (X,))
    assert isinstance(caught.value, CaptureError | ModeError)
    assert read_ambient() == found
    assert held_by_torch() == before


def test_random_numbers_from_zero_are_captured() -> None:
    """Torch's trace calls `aten.random_.from`, which is no Python (2.13)."""

    def does(model: Model, x: Tensor) -> Tensor:
        return x + torch.empty_like(x).random_(0, 9)

    model = Model(does)
    program = capture(model, (X,))
    torch.manual_seed(1)
    expected = model(X)
    torch.manual_seed(1)
    assert torch.equal(program.module()(X), expected)


def test_the_reason_of_torch_is_chained() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Model(failing), (X,))
    assert isinstance(caught.value.__cause__, LookupError)


def test_its_own_backward_is_no_matter_where_no_gradients_flow() -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            return Cubed.apply(model.first(x))

    model = Model(does)
    assert same(captured(model, (X,)).module()(X), model(X))


def test_a_model_that_does_something_else_without_gradients_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        return model.second(model.first(x) if torch.is_grad_enabled() else x)

    with caplog.at_level(logging.WARNING, logger="partita"):
        capture(Model(does), (X,))
    assert "Model behaves differently when gradients are off" in caplog.text


def test_a_model_that_does_something_else_under_autocast_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        return model.first(x.to(torch.bfloat16)) if torch.is_autocast_enabled("cpu") else model.first(x)

    with caplog.at_level(logging.WARNING, logger="partita"):
        program = capture(Model(does), (X,))
    assert "Model behaves differently when its caller has autocast on" in caplog.text
    assert program.module()(X).dtype is torch.float32


def answering(asks: Callable[[], Any], does: Callable[[Model, Tensor, Any], Tensor]) -> Model:
    return Model(lambda model, x: does(model, x, asks()))


ON_THE_ANSWER: dict[str, Callable[[Model, Tensor, Any], Tensor]] = {
    "another constant": lambda model, x, yes: model.first(x) * (2 if yes else 3),
    "a constant of another type": lambda model, x, yes: x.long() * (True if yes else 1),
    "another dtype": lambda model, x, yes: model.first(x).to(torch.float64 if yes else torch.float32),
    "another value": lambda model, x, yes: model.first(x) + (x if yes else model.second(x) * 0 + model.first(x)),
    "another weight": lambda model, x, yes: x * (model.first if yes else model.second).bias,
    "another tensor": lambda model, x, yes: x * torch.tensor(2.0 if yes else 3.0),
    "another result": lambda model, x, yes: (model.first(x), model.second(x))[int(bool(yes))],
    "another flag": lambda model, x, yes: nn.functional.dropout(model.first(x), training=bool(yes)),
    "in a body": lambda model, x, yes: torch.cond(x.sum() > 0, lambda x: x * (2 if yes else 3), lambda x: x + 1, (x,)),
}


def within(block: Any, model: Model, x: Tensor) -> Tensor:
    with block:
        return model.first(x)


@pytest.mark.parametrize("how", [*ON_THE_ANSWER, "inference", "autocast"])
def test_whatever_hangs_on_the_callers_gradients_is_reported(how: str, caplog: pytest.LogCaptureFixture) -> None:
    does = ON_THE_ANSWER | {
        "inference": lambda model, x, yes: within(torch.inference_mode(not yes), model, x),
        "autocast": lambda model, x, yes: within(torch.autocast("cpu", torch.bfloat16, enabled=yes), model, x),
    }
    model = answering(lambda: torch.is_grad_enabled(), does[how])
    with caplog.at_level(logging.WARNING, logger="partita"):
        program = capture(model, (X,))
    assert "Model behaves differently when gradients are off; captured is what it does with gradients on" in caplog.text
    assert_same_draws(program.module(), model)


@pytest.mark.parametrize("how", [*ON_THE_ANSWER, "gradients"])
def test_whatever_hangs_on_the_callers_autocast_is_reported(how: str, caplog: pytest.LogCaptureFixture) -> None:
    does = ON_THE_ANSWER | {"gradients": lambda model, x, yes: within(torch.set_grad_enabled(not yes), model, x)}
    model = answering(lambda: torch.is_autocast_enabled("cpu"), does[how])
    with caplog.at_level(logging.WARNING, logger="partita"):
        program = capture(model, (X,))
    assert "when its caller has autocast on; captured is what it does with autocast off" in caplog.text
    assert_same_draws(program.module(), model)


def assert_same_draws(ours: nn.Module, theirs: nn.Module) -> None:
    """Both give the same, drawing the same random numbers."""
    given = []
    for module in (ours, theirs):
        torch.manual_seed(5)
        given.append(module(X))
    assert same(*given)
    assert given[0].requires_grad == given[1].requires_grad


def test_questions_in_the_body_of_an_operator_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return x * (2 if torch.is_grad_enabled() else 3) * (5 if torch.is_autocast_enabled("cpu") else 7)

        return torch.cond(x.sum() > 0, body, lambda x: x + 1, (x,))

    with caplog.at_level(logging.WARNING, logger="partita"):
        capture(Model(does), (X,))
    assert "behaves differently when gradients are off" in caplog.text
    assert "behaves differently when its caller has autocast on" in caplog.text


QUESTIONS: dict[str, Callable[[], Any]] = {
    "is_autocast_enabled": lambda: torch.is_autocast_enabled("cpu"),
    "is_autocast_enabled, by index": lambda: torch.is_autocast_enabled("cpu:0"),
    "is_autocast_cpu_enabled": lambda: torch.is_autocast_cpu_enabled(),
    "in torch._C": lambda: torch._C.is_autocast_enabled("cpu"),
    "_is_any_autocast_enabled": lambda: torch._C._is_any_autocast_enabled(),
    "get_autocast_dtype": lambda: torch.get_autocast_dtype("cpu") is torch.float16,
    "get_autocast_cpu_dtype": lambda: torch.get_autocast_cpu_dtype() is torch.float16,
    "is_autocast_cache_enabled": lambda: not torch.is_autocast_cache_enabled(),
    "a name of this file": lambda: asks_for_autocast("cpu"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_for_autocast_is_heard(question: str, caplog: pytest.LogCaptureFixture) -> None:
    model = answering(QUESTIONS[question], lambda model, x, yes: model.first(x) * (2 if yes else 3))
    with caplog.at_level(logging.WARNING, logger="partita"):
        program = capture(model, (X,))
    assert "behaves differently when its caller has autocast on" in caplog.text
    assert same(program.module()(X), model(X))


def test_inside_a_block_of_the_model_questions_for_it_are_not_for_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        with torch.autocast("cpu:0", dtype=torch.float16):
            return model.first(x).to(torch.get_autocast_dtype("cpu")) * int(torch.is_autocast_enabled("cpu:0"))

    model = Model(does)
    with caplog.at_level(logging.WARNING, logger="partita"):
        assert same(captured(model, (X,)).module()(X), model(X))
    assert not caplog.text


def test_numbers_that_do_not_equal_themselves_are_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        asked = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        return x * float("nan") + torch.tensor(float("nan")) * len(asked)

    with caplog.at_level(logging.WARNING, logger="partita"):
        capture(Model(does), (X,))
    assert not caplog.text


def test_a_model_that_asks_but_does_the_same_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        return model.first(x) * int(torch.is_grad_enabled() or True)

    with caplog.at_level(logging.WARNING, logger="partita"):
        capture(Model(does), (X,))
    assert not caplog.text


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "message"),
    [
        (3, (X,), None, "not int"),
        (nn.Linear(4, 4), X, None, r"not Tensor; give \(x,\)"),
        (nn.Linear(4, 4), [X], None, "not list"),
        (nn.Linear(4, 4), (), {3: X}, "kwargs"),
        (torch.export.export(nn.Linear(4, 4), (X,)), (X,), None, "captured already"),
        (capture(nn.Linear(4, 4), (X,)), (X,), None, "captured already"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(model: Any, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        capture(model, args, kwargs)


IN_A_NEW_PROCESS = """
import torch
import partita

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.exp(), (x,))

x = torch.ones(3)
assert "torch._dynamo" not in __import__("sys").modules
partita.capture(Model(), (x,))

def by_autocast(x):
    return x.sin() if torch.is_autocast_enabled("cpu") else x.cos()

def by_grad(x):
    return x.sin() if not torch.is_grad_enabled() else x.cos()

for function in (by_autocast, by_grad):
    assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(x), x.cos())
assert torch.is_grad_enabled in torch.overrides.get_ignored_functions()
for functions in torch.overrides.get_overridable_functions().values():
    assert "is_grad_enabled" not in [function.__name__ for function in functions]
"""


def test_dynamo_works_as_before_after_a_capture() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def held_by_torch() -> list[Any]:
    """The values of the attributes that a capture patches."""
    patches = _all_patches(nn.Identity(), Recorder(), lambda *args: args)
    return [(patch.owner, patch.name, vars(patch.owner)[patch.name]) for patch in patches]


def test_everything_is_put_back() -> None:
    before = held_by_torch()
    capture(Model(lambda model, x: model.first(x)), (X,))
    assert held_by_torch() == before
    assert len(before) > 10


class Waiting(nn.Module):
    """Lets another thread work while this one is being traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.is_inside, self.may_go_on = Event(), Event()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.layer(x)
            self.is_inside.set()
            assert self.may_go_on.wait(60)
        return hidden * self.layer(x)


def test_other_threads_keep_what_is_torchs_own() -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = model.second(x)
        return model.first(x) * scale

    waiting, programs = Waiting(), []
    thread = Thread(target=lambda: programs.append(capture(waiting, (X,))))
    thread.start()
    try:
        assert waiting.is_inside.wait(60)
        elsewhere = torch.export.export(Model(does), (X,))
        with torch.no_grad(), torch.inference_mode():
            inside = X + 1
        plain = torch.is_grad_enabled()
    finally:
        waiting.may_go_on.set()
        thread.join()
    expected = torch.export.export(Model(does), (X,))
    assert [str(node.target) for node in elsewhere.graph.nodes] == [str(node.target) for node in expected.graph.nodes]
    assert torch.ops.higher_order.wrap_with_set_grad_enabled in [node.target for node in elsewhere.graph.nodes]
    assert inside.is_inference()
    assert plain
    modes = programs[0].modes
    assert [str(modes.at(programs[0].index.number[node])) for node in programs[0].operators() if _computes(node)] == [
        "no_grad",
        "the caller's modes",
        "the caller's modes",
    ]


def _computes(node: Any) -> bool:
    return node.target not in toggles.TOGGLES and node.target is not toggles.IS_GRAD_ENABLED


def test_two_threads_capture_one_after_the_other() -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = model.second(x)
        return model.first(x) * scale

    programs: list[Any] = []
    models = [Model(does) for _ in range(3)]  # Here, since all threads draw from the same random numbers.
    threads = [Thread(target=lambda model=model: programs.append(capture(model, (X,)))) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(programs) == 3
    assert all(same(program.module()(X), Model(does)(X)) for program in programs)


def _hooks_a_result(model: Model, x: Tensor) -> Tensor:
    y = model.first(x)
    y.register_hook(lambda gradient: gradient * 3)
    return y.sin()


def _hooks_a_weight(model: Model, x: Tensor) -> Tensor:
    model.first.weight.register_post_accumulate_grad_hook(lambda weight: None)
    return model.first(x)


def _changes_what_is_saved(model: Model, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor):
        return model.first(x).sin()


@pytest.mark.parametrize(
    ("does", "name"),
    [
        (_hooks_a_result, "Tensor.register_hook"),
        (_hooks_a_weight, "register_post_accumulate_grad_hook"),
        (_changes_what_is_saved, "saved_tensors_hooks"),
    ],
)
def test_a_hook_that_a_model_registers_is_refused_by_name(does: Callable[..., Tensor], name: str) -> None:
    with pytest.raises(CaptureError, match=rf"{name}, and no graph keeps a hook"):
        capture(Model(does), (X,))
    does(Model(does), X)  # Outside of a capture it works as before.


def test_a_backward_hook_of_a_module_is_refused_by_the_name_of_the_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model[1].register_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"module '1' \(Tanh\) has a hook of register_backward_hook"):
        capture(model, (torch.randn(2, 3),))


def test_saved_tensors_that_only_move_are_captured() -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model.first(x).sin()

    assert same(capture(Model(does), (X,)).module()(X), Model(does)(X))


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones(()))[0]])
def test_a_gradient_transform_inside_a_model_is_refused(transform: Any) -> None:
    def does(model: Model, x: Tensor) -> Tensor:
        return transform(lambda a: a.sin().sum())(x) * 2

    with pytest.raises(CaptureError, match="Expected FakeTensor" if IS_OLD else "gradient transform"):
        capture(Model(does), (X,))


def test_a_module_among_the_arguments_is_refused() -> None:
    class Applies(nn.Module):
        def forward(self, x: Tensor, function: nn.Module) -> Any:
            return function(x) * 2

    with pytest.raises(CaptureError, match=r"one of its arguments is a module, ReLU; make it an attribute"):
        capture(Applies(), (X, nn.ReLU()))


class Called(nn.Module):
    """A model whose only state is called like this."""

    def __init__(self, name: str, state: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self.name = name
        self.register_buffer(name, state) if type(state) is Tensor else setattr(self, name, state)

    def forward(self, x: Tensor) -> Tensor:
        state = getattr(self, self.name)
        return state(x) if isinstance(state, nn.Module) else x * state


@pytest.mark.parametrize("state", [nn.Linear(4, 4), nn.Parameter(torch.ones(4)), torch.ones(4)])
@pytest.mark.parametrize("name", ["graph", "code", "meta", "_in_spec"])
def test_state_that_no_graph_module_could_hold_is_refused_by_name(name: str, state: Any) -> None:
    model = Called(name, state)
    with pytest.raises(CaptureError, match=f"it holds '{name}.*rename it, or capture a module that has the model"):
        capture(model, (X,))
    inner = nn.Sequential(model)
    assert torch.equal(capture(inner, (X,)).module()(X), model(X))
