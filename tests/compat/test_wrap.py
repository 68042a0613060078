"""`compat.wrap`: torch's operators under torch's names, the same result, and the mode restored where torch leaks it."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._higher_order_ops import wrap as theirs
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from partita import hops, recompute
from partita.compat import wrap as ours
from partita.compat.replace_autocast_with_hop_pass import replace_autocast_with_hop_pass
from partita.compat.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass
from partita.errors import OptionError

CALLS = {
    "wrap": (),
    "wrap_with_set_grad_enabled": (False,),
    "wrap_with_autocast": ("cpu", torch.bfloat16, True, None),
}


@pytest.fixture
def _grad_mode_kept() -> Iterator[None]:
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        yield


@pytest.mark.parametrize("name", CALLS)
def test_results_equal_those_of_torch(name: str) -> None:
    body, x = nn.Linear(2, 2), torch.randn(1, 2)
    found, expected = (getattr(module, name)(*CALLS[name], body, input=x) for module in (ours, theirs))
    assert torch.equal(found, expected)
    assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)


CHECKPOINTS = ("wrap_activation_checkpoint", "tag_activation_checkpoint")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_give_the_result_and_the_gradients_of_torch(name: str) -> None:
    body, x = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Tanh())), torch.randn(1, 2)
    found, expected = (getattr(module, name)(body, x) for module in (ours, theirs))
    assert torch.equal(found, expected)
    gradients = (torch.autograd.grad(result.sum(), list(body.parameters())) for result in (found, expected))
    assert all(map(torch.equal, *gradients))


def test_keywords_of_checkpoints_are_divided_as_torch_does() -> None:
    given = {"x": 1, "use_reentrant": False, "preserve_rng_state": True, "context_fn": None, "debug": False}
    for module in (ours, theirs):
        own, rest = module.tag_activation_checkpoint.divide_kwargs(dict(given))
        assert (set(own), rest) == (set(given) - {"x"}, {"x": 1})


@pytest.mark.parametrize("name", [*CALLS, *CHECKPOINTS])
def test_names_are_those_of_torch_and_objects_those_of_partita(name: str) -> None:
    owner = recompute if "checkpoint" in name else hops
    assert getattr(ours, name) is getattr(owner, name)
    assert getattr(ours, name) is not getattr(theirs, name)
    assert isinstance(getattr(ours, name), torch._ops.HigherOrderOperator)
    assert getattr(torch.ops.higher_order, name) is getattr(theirs, name)


@pytest.mark.usefixtures("_grad_mode_kept")
def test_the_grad_mode_that_torch_leaks_is_restored() -> None:
    def body() -> Any:
        raise KeyError

    with pytest.raises(KeyError):
        ours.wrap_with_set_grad_enabled(False, body)
    assert torch.is_grad_enabled()
    with pytest.raises(KeyError):
        theirs.wrap_with_set_grad_enabled(False, body)
    assert not torch.is_grad_enabled()


FIRST_ARGUMENTS = {
    "wrap": {"func": torch.sin},
    "wrap_with_set_grad_enabled": {"enable_grad": False, "wrapped_func": torch.sin},
    "wrap_with_autocast": {
        "device_type": "cpu",
        "dtype": None,
        "enabled": True,
        "cache_enabled": None,
        "wrapped_func": torch.sin,
    },
    "wrap_activation_checkpoint": {"function": torch.sin},
    "tag_activation_checkpoint": {"gmod": torch.sin},
}


@pytest.mark.parametrize("name", FIRST_ARGUMENTS)
def test_every_argument_can_be_passed_by_keyword_under_torchs_name(name: str) -> None:
    x, operator = torch.randn(2), getattr(ours, name)
    theirs_takes = inspect.signature(getattr(theirs, name).__call__).parameters
    assert list(theirs_takes)[: len(FIRST_ARGUMENTS[name])] == list(FIRST_ARGUMENTS[name])
    assert torch.equal(operator(input=x, **FIRST_ARGUMENTS[name]), x.sin())
    traced = make_fx(lambda x: operator(input=x, **FIRST_ARGUMENTS[name]), pre_dispatch=True)(x)
    (call,) = [node for node in traced.graph.nodes if node.target == operator]
    assert call.kwargs == {}


@pytest.mark.parametrize("name", FIRST_ARGUMENTS)
def test_keywords_are_taken_in_a_compiled_function_too(name: str) -> None:
    torch._dynamo.reset()
    x, operator = torch.randn(2), getattr(ours, name)
    compiled = torch.compile(lambda x: operator(input=x, **FIRST_ARGUMENTS[name]), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x.sin())


def test_a_keyword_of_an_argument_passed_by_position_is_the_bodys() -> None:
    x = torch.randn(2, dtype=torch.float64)
    found = ours.wrap_with_autocast("cpu", None, True, None, torch.sum, x, dtype=torch.float32)
    assert found.dtype == torch.float32


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(OptionError, match="wrap_with_set_grad_enabled is called without 'wrapped_func'"):
        ours.wrap_with_set_grad_enabled(enable_grad=True)


@pytest.mark.parametrize("kind", ["Wrap", "WrapActivationCheckpoint", "TagActivationCheckpoint"])
def test_operators_can_be_subclassed_as_those_of_torch(kind: str) -> None:
    class Counted(getattr(ours, kind)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().__call__(function, *args, **kwargs)

    operator, x = Counted(), torch.randn(2, requires_grad=True)
    assert torch.equal(operator(torch.sin, x), x.sin())
    assert operator.calls == 1
    assert isinstance(operator, torch._ops.HigherOrderOperator)
    assert getattr(torch.ops.higher_order, operator.__name__) is operator
    assert operator.__name__ not in ("wrap", "partita_wrap")
    assert pickle.loads(pickle.dumps(operator)) is operator
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: operator(torch.sin, x) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), x.sin() + 1)


def test_a_second_operator_of_a_class_leaves_the_first_one_its_name() -> None:
    second = ours.WrapWithSetGradEnabled()
    assert torch.ops.higher_order.partita_set_grad_enabled is ours.wrap_with_set_grad_enabled
    assert torch.ops.higher_order.wrap_with_set_grad_enabled is theirs.wrap_with_set_grad_enabled
    assert second != ours.wrap_with_set_grad_enabled
    assert not second(False, torch.sin, torch.ones(2, requires_grad=True)).requires_grad


def test_whoever_looks_for_an_operator_finds_the_calls_that_a_pass_wrote() -> None:
    def blocks(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
        with torch.autocast("cpu"):
            return y @ x

    graph_module = make_fx(blocks, pre_dispatch=True)(torch.randn(3, 3))
    graph_module, _ = replace_set_grad_with_hop_pass(graph_module, None)
    graph_module, _ = replace_autocast_with_hop_pass(graph_module, None)
    for name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
        found = [
            graph_module.graph.find_nodes(op="call_function", target=getattr(kind, name)) for kind in (ours, theirs)
        ]
        assert len(found[0]) == 1
        assert found[0] == found[1]
        assert found[0][0].target is getattr(theirs, name)


@pytest.mark.parametrize("name", CALLS)
def test_equal_operators_are_one_key(name: str) -> None:
    mine, other = getattr(ours, name), getattr(theirs, name)
    assert mine == other
    assert other == mine
    assert {mine: 1}[other] == 1
    assert mine != hops.call


def test_wrap_is_one_unit_for_dynamo_with_the_gradients_of_its_body() -> None:
    torch._dynamo.reset()
    graphs, layer, x = [], nn.Linear(2, 2), torch.randn(1, 2)

    def backend(graph_module: GraphModule, inputs: Any) -> Any:
        graphs.append(graph_module)
        return aot_eager(graph_module, inputs)

    compiled = torch.compile(lambda x: ours.wrap(lambda y: layer(y).sin(), x) * 2, backend=backend, fullgraph=True)
    found = torch.autograd.grad(compiled(x).sum(), layer.weight)
    (call,) = graphs[0].graph.find_nodes(op="call_function", target=ours.wrap)
    assert call.target is ours.wrap
    assert "sin" not in graphs[0].code
    torch.testing.assert_close(found, torch.autograd.grad((layer(x).sin() * 2).sum(), layer.weight))


def test_classes_are_related_as_those_of_torch() -> None:
    names = [name for name in ours.__all__ if name[0].isupper()]
    for one in names:
        for other in names:
            assert issubclass(getattr(ours, one), getattr(ours, other)) is (one == other)
