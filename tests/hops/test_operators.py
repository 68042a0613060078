"""Operators with a body, run: what the body sees, what is there afterwards, and what autograd makes of it."""

from __future__ import annotations

import copy
import importlib
import operator
import pickle
import threading
from typing import Any, NamedTuple

import pytest
import torch
from tests.hops.helpers import CASES, Case, Regions, assert_equal, gradients, printed_by_new_process, seeded
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import partita.hops
from partita import hops
from partita._torch.modes import read_ambient
from partita.errors import OptionError

OPERATORS = [getattr(hops, name) for name in hops.__all__]
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def _modes() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


@every_case
@pytest.mark.parametrize("ambient", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_body_sees_the_modes_of_the_plain_block(case: Case, ambient: Any) -> None:
    with ambient():
        before = read_ambient()
        assert case.call(_modes) == case.plainly(_modes)
        assert read_ambient() == before


@every_case
def test_modes_are_restored_when_the_body_raises(case: Case) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16, cache_enabled=False), torch.enable_grad():
            raise KeyError(x)

    before = read_ambient()
    with pytest.raises(KeyError):
        case.call(body, torch.ones(1))
    assert read_ambient() == before


@every_case
@pytest.mark.parametrize("inference", [(True,), (True, False), (True, False, True)])
def test_bare_toggles_of_a_failing_body_are_undone(case: Case, inference: tuple[bool, ...]) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.float16, True, False))
    enter, leave = torch.autograd.grad_mode._enter_inference_mode, torch.autograd.grad_mode._exit_inference_mode
    blocks = [graph.call_function(enter, (enabled,)) for enabled in inference]
    result = graph.call_function(torch.mm, (x, x))
    # A block that nobody leaves is over at once: generated code drops what it does not need any more.
    for block in reversed(blocks):
        graph.call_function(leave, (block,))
    graph.output(result)
    before = read_ambient()
    with pytest.raises(RuntimeError, match="must be a matrix"):
        case.call(torch.fx.GraphModule({}, graph), torch.ones(3))
    assert read_ambient() == before


def test_inference_blocks_of_a_failing_interpreter_are_left() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for enabled in (True, False, True):
        graph.call_function(torch.autograd.grad_mode._enter_inference_mode, (enabled,))
    graph.output(graph.call_function(torch.mm, (x, x)))
    interpreter = torch.fx.Interpreter(torch.fx.GraphModule({}, graph), garbage_collect_values=False)
    before = read_ambient()
    with pytest.raises(RuntimeError, match="must be a matrix"):
        hops.call(interpreter.run, torch.ones(3))
    assert read_ambient() == before


def test_bare_toggles_of_a_failing_function_are_undone() -> None:
    def body() -> None:
        torch._C._set_grad_enabled(False)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_cache_enabled(False)
        raise ValueError

    before = read_ambient()
    with pytest.raises(ValueError, match=r"^$"):
        hops.call(body)
    assert read_ambient() == before


def _switches_and_raises(x: torch.Tensor) -> Any:
    torch._C._set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    raise ValueError(x)


def _graph_body(write: Any, root: Any = None) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(write(graph, graph.placeholder("x")))
    return torch.fx.GraphModule(nn.Module() if root is None else root, graph)


def _with_inner_body(run: Any, *leading: Any) -> torch.fx.GraphModule:
    def toggling(graph: Any, x: Any) -> Any:
        graph.call_function(torch._C._set_grad_enabled, (False,))
        graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.float16, True, False))
        return (graph.call_function(torch.mm, (x, x)),)

    root = nn.Module()
    root.inner = _graph_body(toggling)
    return _graph_body(lambda graph, x: graph.call_function(run, (*leading, graph.get_attr("inner"), x)), root)


def _with_hook() -> torch.fx.GraphModule:
    body = _graph_body(lambda graph, x: x)
    body.register_forward_pre_hook(lambda _, given: _switches_and_raises(*given))
    return body


FAILING = {
    "function": lambda: _graph_body(lambda graph, x: graph.call_function(_switches_and_raises, (x,))),
    "hook": _with_hook,
    "body": lambda: _with_inner_body(hops.call),
    "body called by hand": lambda: _with_inner_body(operator.call),
    "body of torch": lambda: _with_inner_body(torch.ops.higher_order.wrap),
    "body of torch's mode": lambda: _with_inner_body(torch.ops.higher_order.wrap_with_set_grad_enabled, False),
}


@every_case
@pytest.mark.parametrize("build", FAILING.values(), ids=FAILING)
def test_what_the_code_inside_a_failing_graph_has_switched_is_undone(case: Case, build: Any) -> None:
    before = read_ambient()
    with pytest.raises((ValueError, RuntimeError)):
        case.call(build(), torch.ones(3))
    assert read_ambient() == before


def test_nested_modes_are_each_restored() -> None:
    def innermost(x: torch.Tensor) -> Any:
        assert _modes() == (True, True, True)
        return x @ x

    def middle(x: torch.Tensor) -> Any:
        assert _modes() == (False, True, True)
        return hops.wrap_with_set_grad_enabled(True, innermost, x), _modes()

    def outer(x: torch.Tensor) -> Any:
        return hops.wrap_with_autocast("cpu", torch.bfloat16, True, None, middle, x), _modes()

    x = torch.ones(2, 2, requires_grad=True)
    (y, after_grad), after_autocast = hops.wrap_with_inference_mode(True, outer, x)
    assert (after_grad, after_autocast, _modes()) == (
        (False, True, True),
        (False, True, False),
        (True, False, False),
    )
    assert y.is_inference()
    assert y.dtype == torch.bfloat16
    assert not y.requires_grad


def test_autocast_state_of_other_devices_and_the_cache_flag_are_kept() -> None:
    with torch.autocast("cpu", torch.float16, enabled=True, cache_enabled=False):
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            before = read_ambient()
            inside = hops.wrap_with_autocast("cpu", torch.bfloat16, True, True, read_ambient)
            assert (inside.autocast_cache, inside.autocast_depth) == (True, before.autocast_depth + 1)
            assert read_ambient() == before
        finally:
            torch.set_autocast_dtype("cuda", torch.float16)


def test_autocast_without_dtype_takes_the_one_that_is_set() -> None:
    x = torch.ones(2, 2)
    assert hops.wrap_with_autocast("cpu", None, True, None, torch.mm, x, x).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert hops.wrap_with_autocast("cpu", None, True, None, torch.mm, x, x).dtype == torch.float16


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("found", [True, False])
def test_autocast_cache_is_as_passed_or_as_found(given: bool | None, found: bool) -> None:
    torch.set_autocast_cache_enabled(found)
    try:
        seen = hops.wrap_with_autocast("cpu", None, True, given, torch.is_autocast_cache_enabled)
        assert seen == (found if given is None else given)
        assert torch.is_autocast_cache_enabled() == found
    finally:
        torch.set_autocast_cache_enabled(True)


def test_threads_do_not_see_each_other() -> None:
    inside, done = threading.Event(), threading.Event()

    def body() -> None:
        inside.set()
        assert done.wait(10)

    worker = threading.Thread(target=hops.wrap_with_set_grad_enabled, args=(False, body))
    worker.start()
    assert inside.wait(10)
    assert torch.is_grad_enabled()
    assert hops.wrap_with_autocast("cpu", None, True, None, torch.is_grad_enabled)
    done.set()
    worker.join()


# Operands and results -----------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@every_case
def test_operands_and_results_of_any_shape_pass(case: Case) -> None:
    def body(*operands: Any, **keywords: Any) -> Any:
        return operands, keywords

    x = torch.ones(2)
    operands = (x, 3, None, "text", 1.5, [x, {"k": (x,)}], Pair(x, 1), slice(1, 2), torch.float16, object())
    keywords = {"body": x, "enabled": 3, "mode": [x], "device_type": None, "self": 1, "operator": 2}
    found, named = case.call(body, *operands, **keywords)
    assert all(ours is theirs for ours, theirs in zip(found, operands, strict=True))
    assert named == keywords


@every_case
@pytest.mark.parametrize("result", [None, 3, "text", (), [], {}, (None, 1), object()], ids=range(8))
def test_results_without_tensors_pass(case: Case, result: Any) -> None:
    assert case.call(lambda: result) is result


@every_case
def test_bodies_may_be_modules_and_graph_modules(case: Case) -> None:
    module = nn.Linear(2, 2)
    graph_module = torch.fx.symbolic_trace(module)
    x = torch.ones(1, 2)
    for body in (module, graph_module, graph_module.forward, nn.Sequential(module)):
        assert torch.equal(case.call(body, x), case.plainly(body, x))


@every_case
def test_empty_body_gives_its_operand(case: Case) -> None:
    x = torch.ones(2, requires_grad=True)
    assert case.call(lambda given: given, x) is x


@every_case
def test_body_runs_once_per_call(case: Case) -> None:
    calls: list[torch.Tensor] = []
    case.call(calls.append, torch.ones(1))
    case.call(calls.append, torch.ones(1))
    assert len(calls) == 2


@every_case
def test_hooks_of_a_body_run(case: Case) -> None:
    module, seen = nn.Linear(2, 2), []
    module.register_forward_hook(lambda *_: seen.append(_modes()))
    case.call(module, torch.ones(1, 2))
    assert seen == [case.plainly(_modes)]


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_type", ["banana", "CUDA", "", "meta", 3, None, torch.device("cpu")])
def test_unknown_device_types_are_refused_with_the_known_ones(device_type: Any) -> None:
    before = read_ambient()
    with pytest.raises(OptionError, match=r"no device type .*; it knows cpu, cuda"):
        hops.wrap_with_autocast(device_type, None, True, None, torch.ones, 1)
    assert read_ambient() == before


@pytest.mark.parametrize(
    ("operator", "mode", "named"),
    [
        (hops.wrap_with_set_grad_enabled, (1,), "enable_grad"),
        (hops.wrap_with_set_grad_enabled, (None,), "enable_grad"),
        (hops.wrap_with_set_grad_enabled, (torch.tensor(True),), "enable_grad"),
        (hops.wrap_with_inference_mode, ("yes",), "mode"),
        (hops.wrap_with_autocast, ("cpu", None, None, None), "enabled"),
        (hops.wrap_with_autocast, ("cpu", None, True, 0), "cache_enabled"),
        (hops.wrap_with_autocast, ("cpu", "bfloat16", True, None), "dtype"),
    ],
)
def test_modes_of_a_wrong_type_are_refused(operator: Any, mode: tuple[Any, ...], named: str) -> None:
    before = read_ambient()
    with pytest.raises(OptionError, match=f"^{named} must be"):
        operator(*mode, torch.ones, 1)
    assert read_ambient() == before


@every_case
def test_a_body_that_cannot_be_called_is_refused(case: Case) -> None:
    with pytest.raises(OptionError, match=r"takes a body to call after .* not 'Tensor'"):
        case.call(torch.ones(1))


# Autograd and transforms --------------------------------------------------------------------------------------------


@every_case
def test_training_step_equals_the_plain_block_bitwise(case: Case) -> None:
    x = torch.randn(3, 4)
    ours, theirs = seeded(lambda: Regions(case.call)), seeded(lambda: Regions(case.plainly))
    assert torch.equal(ours(x), theirs(x))
    assert_equal(gradients(ours, x), gradients(theirs, x))


@pytest.mark.parametrize("outer", CASES.values(), ids=CASES)
@every_case
def test_nested_operators_give_the_gradients_of_nested_blocks(outer: Case, case: Case) -> None:
    def nested(run_outer: Any, run_inner: Any) -> Any:
        w = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
        y = run_outer(lambda a: torch.sin(run_inner(lambda b: (b @ w).tanh(), a)), torch.ones(2, 4))
        if not y.requires_grad:
            return y.dtype, y.is_inference(), None
        y.float().sum().backward()
        return y.dtype, y.is_inference(), w.grad

    ours, theirs = nested(outer.call, case.call), nested(outer.plainly, case.plainly)
    assert ours[:2] == theirs[:2]
    assert_equal(ours[2:], theirs[2:])


def test_writes_under_no_grad_reach_inputs_and_buffers() -> None:
    norm, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    weight = nn.Parameter(torch.ones(3))
    hops.wrap_with_set_grad_enabled(False, norm, x)
    hops.wrap_with_set_grad_enabled(False, weight.mul_, 2.0)
    assert norm.num_batches_tracked == 1
    assert torch.equal(weight, torch.full((3,), 2.0))
    assert weight.is_leaf


def test_shared_body_gets_gradients_from_both_calls() -> None:
    body, x = nn.Linear(2, 2), torch.ones(1, 2)
    hops.call(body, hops.wrap(body, x)).sum().backward()
    ours = body.weight.grad.clone()
    body.zero_grad()
    body(body(x)).sum().backward()
    assert torch.equal(ours, body.weight.grad)


@every_case
@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize", "jvp", "vmap_grad"])
def test_transforms_go_through(case: Case, transform: str) -> None:
    def f(run: Any, x: torch.Tensor) -> torch.Tensor:
        return (x.cos() + run(lambda a, *, k: (a.sin() * k).clone().add_(1), x, k=2.0)).sum()

    x = torch.randn(3, 4)

    def through(run: Any) -> Any:
        if transform == "vmap":
            return torch.vmap(lambda a: f(run, a))(x)
        if transform == "grad":
            return torch.func.grad(lambda a: f(run, a))(x)
        if transform == "functionalize":
            return torch.func.functionalize(lambda a: f(run, a))(x)
        if transform == "jvp":
            return torch.func.jvp(lambda a: f(run, a), (x,), (torch.ones_like(x),))[1]
        return torch.vmap(torch.func.grad(lambda a: f(run, a)))(x)

    assert torch.equal(through(case.call), through(case.plainly))


@every_case
def test_dispatch_modes_of_users_see_the_operators_inside(case: Case) -> None:
    class Log(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 2)
    with Log() as ours:
        y = case.call(torch.mm, x, x)
    with Log() as theirs:
        z = case.plainly(torch.mm, x, x)
    assert ours.seen == theirs.seen
    assert y.is_inference() == z.is_inference()


@every_case
def test_fake_tensors_pass(case: Case) -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 2))
        y = case.call(torch.mm, x, x)
        assert (tuple(y.shape), y.dtype) == ((2, 2), case.plainly(torch.mm, x, x).dtype)


@every_case
def test_tensor_subclasses_pass(case: Case) -> None:
    class Marked(torch.Tensor):
        pass

    x = torch.ones(2).as_subclass(Marked)
    assert type(case.call(torch.neg, x)) is Marked


# The operators as objects -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_operators_have_names_of_their_own(operator: Any) -> None:
    assert operator.name().startswith("partita_")
    assert getattr(torch.ops.higher_order, operator.name()) is operator
    assert repr(operator) == f"<operator partita.hops.{next(n for n in hops.__all__ if getattr(hops, n) is operator)}>"
    assert str(operator) == operator.name()
    assert operator.__doc__


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_operators_survive_copying_and_pickling(operator: Any) -> None:
    assert copy.copy(operator) is operator
    assert copy.deepcopy([operator])[0] is operator
    assert pickle.loads(pickle.dumps(operator)) is operator


def test_unpickling_an_operator_imports_its_module_and_torch_keeps_its_own_operators() -> None:
    pickled = pickle.dumps(hops.wrap_with_autocast)
    source = f"""
import pickle
print(pickle.loads({pickled!r}), pickle.loads({pickled!r}).mode_count)
import torch, partita
print(type(torch.ops.higher_order.wrap).__module__)
"""
    assert printed_by_new_process(source) == "partita_autocast 4\ntorch._higher_order_ops.wrap\n"


def test_loading_the_modules_again_changes_nothing() -> None:
    before = {name: getattr(hops, name) for name in hops.__all__}
    importlib.reload(importlib.import_module("partita.hops.modes"))
    importlib.reload(partita.hops)
    assert {name: getattr(hops, name) for name in hops.__all__} == before
